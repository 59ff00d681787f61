"""Tells gateways that this replica is there, for those that do not have it in their configuration.

Every ``interval_s`` each gateway gets a signed message (:class:`backend.wire.Registration`); it counts the
replica as gone ``lease_s`` after the last one. A replica announces itself as soon as its model is loaded,
goes on while it drains, and says goodbye when it ends.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence

import aiohttp
import msgspec

from backend.config import BackendConfig
from backend.wire import REGISTRATION_PATH, SIGNATURE_HEADER, Registration, sign_registration

_log = logging.getLogger("backend.registrar")
_TOKENS_PER_WEIGHT = 100_000
_MAX_ANSWER_BYTES = 2_000


class Registrar:
    """Keeps a lease at each gateway, each in a task of its own, so that one that is slow delays no other.

    Args:
        num_kv_tokens: how many the KV cache holds, which is the weight when none is configured.
        port: the port that the replica listens on.
    """

    def __init__(self, config: BackendConfig, *, num_kv_tokens: int, port: int) -> None:
        own = config.registration
        weight = own.weight if own.weight is not None else _weight_of(num_kv_tokens)
        self._config = own
        self._pool_token = config.pool_token
        self._template = Registration(
            replica_id=config.replica_id,
            url=own.url.replace("{id}", config.replica_id) or f"http://{_bracketed(config.host)}:{port}",
            models=[config.model.served_as],
            weight=weight,
            instance=secrets.token_hex(8),
            sent_at=0.0,
            lease_s=own.lease_s,
        )
        self._last_sent_at = 0.0
        self._session: aiohttp.ClientSession | None = None
        self._tasks: Sequence[asyncio.Task[None]] = ()

    def start(self) -> None:
        """Begin to send."""
        timeout = aiohttp.ClientTimeout(total=self._config.timeout_s)
        self._session = aiohttp.ClientSession(timeout=timeout)
        self._tasks = [asyncio.create_task(self._keep_telling(gateway)) for gateway in self._config.gateways]

    async def stop(self) -> None:
        """Say goodbye to every gateway, for at most ``timeout_s``. Idempotent."""
        session, self._session = self._session, None
        if session is None:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        goodbyes = (self._tell(session, gateway, is_leaving=True) for gateway in self._config.gateways)
        await asyncio.gather(*goodbyes)
        await session.close()

    async def _keep_telling(self, gateway: str) -> None:
        assert self._session is not None
        trouble = ""
        while True:
            before, trouble = trouble, await self._tell(self._session, gateway)
            if trouble and _kind(trouble) != _kind(before):
                _log.warning("not registered", extra={"fields": {"gateway": gateway, "reason": trouble}})
            elif before and not trouble:
                _log.info("registered", extra={"fields": {"gateway": gateway}})
            await asyncio.sleep(self._config.interval_s)

    async def _tell(self, session: aiohttp.ClientSession, gateway: str, *, is_leaving: bool = False) -> str:
        """Send one message; what was wrong, or nothing."""
        said = msgspec.structs.replace(self._template, sent_at=self._next_time(), is_leaving=is_leaving)
        body = msgspec.json.encode(said)
        headers = {
            "content-type": "application/json",
            SIGNATURE_HEADER: sign_registration(body, self._pool_token),
        }
        try:
            async with session.post(
                gateway.rstrip("/") + REGISTRATION_PATH, data=body, headers=headers, allow_redirects=False
            ) as answer:
                if answer.status == 204:
                    return ""
                text = (await answer.content.read(_MAX_ANSWER_BYTES)).decode("utf-8", "replace")
                return f"answered {answer.status}: {text}"
        except (aiohttp.ClientError, OSError) as error:
            return str(error) or type(error).__name__
        except TimeoutError:
            return f"no answer within {self._config.timeout_s} s"

    def _next_time(self) -> float:
        """Unix seconds, always later than the last: gateways take no message twice."""
        self._last_sent_at = max(time.time(), self._last_sent_at + 1e-4)
        return self._last_sent_at


def _kind(trouble: str) -> str:
    """What is said once: a gateway's message names the request, so no two are equal."""
    return trouble.partition(": ")[0]


def _weight_of(num_kv_tokens: int) -> float:
    """In two digits, so that a restart that finds a little less memory moves no sessions."""
    return max(float(f"{num_kv_tokens / _TOKENS_PER_WEIGHT:.1e}"), 1e-6)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
