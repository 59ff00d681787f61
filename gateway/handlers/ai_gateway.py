"""``env.AI.gateway(id)`` of a Worker, as far as there is something behind it.

There is no second gateway here that caches, retries or logs on the way to other providers. What can be had
honestly is had: the addresses of this gateway's own surfaces, and as a log what the usage record of a request
says. Everything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web
from sqlalchemy import Connection, select

from billing import schema
from billing.money import NANOS_PER_UNIT
from billing.periods import instant_text
from billing.usage import CHARGED_STATUSES
from gateway.auth import Authenticator
from gateway.errors import Reason, Refusal
from gateway.handlers.enveloped import caller, enveloped
from gateway.reading import UsageReader

_OWN_PROVIDERS = {"workers-ai": "run", "openai": "v1", "compat": "v1"}
_PATHS = {"binding": "/ai-gateway/run", "run": "/ai/run", "v1": "/ai/v1"}


class AiGatewayRoutes:
    """``public_url`` gives the address that clients reach this gateway at."""

    def __init__(
        self, authenticator: Authenticator, reader: UsageReader, public_url: Callable[[], str]
    ) -> None:
        self._authenticator = authenticator
        self._reader = reader
        self._public_url = public_url

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get("/ai-gateway/gateways/{gateway_id}/url/{provider}", self.url)
        router.add_get("/ai-gateway/gateways/{gateway_id}/logs/{log_id}", self.log)
        router.add_patch("/ai-gateway/gateways/{gateway_id}/logs/{log_id}", self.patch_log)
        router.add_post("/ai-gateway/universal/run/{gateway_id}", self.run_universal)

    async def url(self, request: web.Request) -> web.Response:
        """Where the SDK of a provider can be pointed at. Raises Refusal: 404 for those that are not here."""
        principal = await caller(self._authenticator, request)
        provider = request.match_info["provider"]
        surface = _OWN_PROVIDERS.get(provider)
        if surface is None:
            known = ", ".join(sorted(_OWN_PROVIDERS))
            raise Refusal(
                Reason.NOT_HERE,
                f"No provider {provider[:50]!r} behind this gateway: it serves {known} itself",
            )
        base = f"{self._public_url()}/client/v4/accounts/{principal.account_id}/ai"
        return enveloped({"url": f"{base}/{surface}"})

    async def log(self, request: web.Request) -> web.Response:
        """The usage record of a request of the caller's account. Raises Refusal: 404."""
        principal = await caller(self._authenticator, request)
        log_id = request.match_info["log_id"]
        found = await self._reader.read(
            lambda connection: _find_log(connection, principal.account_id, log_id)
        )
        if found is None:
            raise Refusal(Reason.NOT_FOUND, f"Log {log_id[:50]} not found: it may not be written yet")
        return enveloped(found)

    async def patch_log(self, request: web.Request) -> web.Response:
        """Refused: records are never changed. Raises Refusal."""
        await caller(self._authenticator, request)
        raise Refusal(Reason.NOT_HERE, "Logs are usage records here: no feedback can be added to them")

    async def run_universal(self, request: web.Request) -> web.Response:
        """Refused: there are no other providers. Raises Refusal."""
        await caller(self._authenticator, request)
        raise Refusal(
            Reason.NOT_HERE, "No universal endpoint here: call env.AI.run, which this gateway serves"
        )


def _find_log(connection: Connection, account_id: str, log_id: str) -> dict[str, Any] | None:
    records, transactions = schema.usage_records, schema.ledger_transactions
    row = (
        connection.execute(
            select(records, transactions.c.amount_nanos)
            .outerjoin(transactions, transactions.c.id == records.c.request_id)
            .where(records.c.request_id == log_id, records.c.account_id == account_id)
        )
        .mappings()
        .one_or_none()
    )
    if row is None:
        return None
    return {
        "id": row["request_id"],
        "created_at": instant_text(row["started_at_us"]),
        "provider": "workers-ai",
        "model": row["model"],
        "path": _PATHS.get(row["surface"], f"/{row['surface']}"),
        "duration": (row["finished_at_us"] - row["started_at_us"]) // 1000,
        "success": row["status"] in CHARGED_STATUSES,
        "cached": False,
        "tokens_in": row["prompt_tokens"],
        "tokens_out": row["completion_tokens"],
        "cost": (row["amount_nanos"] or 0) / NANOS_PER_UNIT,
        "metadata": {"cached_tokens": row["cached_prompt_tokens"], "session": row["session"]},
    }
