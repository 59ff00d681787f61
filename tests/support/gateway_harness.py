"""A whole gateway over sockets, with scripted replicas, an account, and a client that reads its frames."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yarl
from sqlalchemy import select

from billing import schema
from billing.accounts import AccountDirectory
from billing.config import BillingConfig, RateCardConfig, SpoolConfig
from billing.posting import Poster
from billing.rates import RateBook
from billing.spool import Spool
from billing.store import Store
from billing.usage import UsageRecord
from gateway.app import Gateway
from gateway.config import (
    EMBEDDINGS_TASK,
    AuthConfig,
    GatewayConfig,
    HealthConfig,
    MeteringConfig,
    ReplicaAddress,
    RoutingConfig,
    ServedModel,
    TelemetryConfig,
    UpstreamConfig,
)
from gateway.telemetry import RequestTracing
from tests.support.fake_replica import FakeReplica

ACCOUNT = "0123456789abcdef0123456789abcdef"
OTHER_ACCOUNT = "fedcba9876543210fedcba9876543210"
TOKEN = "token-of-the-account-0123456789abcdef"
OTHER_TOKEN = "token-of-another-0123456789abcdef00"
MODEL = "@cf/moonshotai/kimi-k2.5"
ALIAS = "@cf/moonshotai/kimi-k2.6"
EMBEDDINGS = "@cf/baai/bge-small-en-v1.5"

MODELS = [
    ServedModel(id=MODEL, aliases=[ALIAS], max_model_len=4096, default_max_tokens=256),
    ServedModel(id=EMBEDDINGS, task=EMBEDDINGS_TASK, max_model_len=512),
]
BILLING = BillingConfig(
    rate_cards=[
        RateCardConfig(
            model=MODEL, effective_from="2026-01-01", input="0.60", output="3.00", cached_input="0.10"
        ),
        RateCardConfig(model=EMBEDDINGS, effective_from="2026-01-01", input="0.02025", output="0"),
    ],
    spool=SpoolConfig(post_interval_s=0.01),
)

_DATABASE_NOTE = "database_url"


def gateway_config(**changes: Any) -> GatewayConfig:
    """Limits small enough for tests to reach."""
    config = GatewayConfig(
        port=0,
        shutdown_grace_s=1.0,
        auth=AuthConfig(cache_ttl_s=0.2),
        health=HealthConfig(probe_interval_s=0.05, probe_timeout_s=0.5),
        routing=RoutingConfig(capacity_wait_s=0.3),
        upstream=UpstreamConfig(connect_timeout_s=0.5, first_byte_timeout_s=2.0, idle_timeout_s=0.4),
        # A test that stops the disk runs in the loop that would wait for it.
        metering=MeteringConfig(abort_usage_wait_s=0.5, commit_timeout_s=2.0, inline_commit_max_s=0.0),
        telemetry=TelemetryConfig(access_log=False),
    )
    return msgspec.structs.replace(config, **changes)


@dataclass
class Reply:
    """An answer, with a stream's frames decoded."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_cut: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def frames(self) -> list[Any]:
        """Decoded data frames; ``[DONE]`` as that string."""
        frames = []
        for frame in self.body.decode().split("\n\n"):
            if frame:
                assert frame.startswith("data: "), frame
                data = frame[len("data: ") :]
                frames.append("[DONE]" if data == "[DONE]" else json.loads(data))
        return frames

    @property
    def text(self) -> str:
        """The concatenated content of a stream's chunks."""
        return "".join(
            choice["delta"].get("content") or ""
            for frame in self.frames
            if isinstance(frame, dict)
            for choice in frame.get("choices", ())
        )


class Harness:
    """One gateway on a data directory; ``restart`` begins another on the same."""

    def __init__(
        self,
        data_dir: Path,
        replicas: Sequence[FakeReplica],
        config: GatewayConfig | None = None,
        tracing: RequestTracing | None = None,
        models: Sequence[ServedModel] = MODELS,
        billing: BillingConfig = BILLING,
    ) -> None:
        """``billing`` needs a rate card for each of ``models``."""
        self.data_dir = data_dir
        self._models = models
        self._billing = billing
        self.replicas = list(replicas)
        self.config = config or gateway_config()
        self._tracing = tracing
        self.gateway: Gateway | None = None
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        addresses = [ReplicaAddress(id=replica.id, url=replica.url) for replica in self.replicas]
        billing = billing_in(self.data_dir, self._billing)
        self.gateway = Gateway(
            self.config, self._models, addresses, billing, self.data_dir, tracing=self._tracing
        )
        await self.gateway.start()
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self.gateway is not None:
            await self.gateway.stop()
            self.gateway = None

    @property
    def base(self) -> str:
        assert self.gateway is not None
        return f"http://127.0.0.1:{self.gateway.server.port}/client/v4/accounts/{ACCOUNT}/ai"

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session

    def url(self, path: str) -> str:
        return path if path.startswith("http") else self.base + path

    async def post(
        self,
        path: str,
        body: Any,
        *,
        token: str | None = TOKEN,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        """POST ``body`` (bytes as they are, anything else as JSON) below the account's ``/ai``."""
        all_headers = {"content-type": "application/json", **(headers or {})}
        if token is not None:
            all_headers["authorization"] = f"Bearer {token}"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = yarl.URL(self.url(path), encoded=True)
        async with self.session.post(url, data=data, headers=all_headers) as response:
            return await _read(response)

    async def chat(self, *, stream: bool = False, path: str = "/v1/chat/completions", **fields: Any) -> Reply:
        """A one-message chat on the OpenAI surface, or with ``path=f"/run/{MODEL}"`` on the native one."""
        headers = fields.pop("headers", None)
        token = fields.pop("token", TOKEN)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}], "stream": stream}
        return await self.post(path, body | fields, headers=headers, token=token)

    async def get(self, path: str, *, token: str | None = TOKEN) -> Reply:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        async with self.session.get(self.url(path), headers=headers) as response:
            return await _read(response)

    def root(self, path: str) -> str:
        """URL of a path at the gateway's root."""
        assert self.gateway is not None
        return f"http://127.0.0.1:{self.gateway.server.port}{path}"

    def health_of(self, replica: FakeReplica) -> str:
        """What the gateway believes of a replica."""
        assert self.gateway is not None
        return next(each.health for each in self.gateway.table.replicas if each.id == replica.id)

    def records(self) -> list[UsageRecord]:
        """All usage records, posted or not, by age. Stop the gateway first: it holds the spool."""
        assert self.gateway is None
        store = open_books(self.data_dir)
        spool = Spool(self.data_dir / "spool", BILLING.spool)
        try:
            Poster(spool, store, RateBook.from_config(BILLING)).drain()
            columns = schema.usage_records.c
            with store.reading() as connection:
                rows = connection.execute(select(schema.usage_records).order_by(columns.started_at_us))
                return [UsageRecord(**row) for row in rows.mappings()]
        finally:
            spool.close()
            store.close()

    async def stopped_records(self) -> list[UsageRecord]:
        """Stop the gateway and return :meth:`records`."""
        await self.stop()
        return self.records()


def billing_in(data_dir: Path, billing: BillingConfig = BILLING) -> BillingConfig:
    """The configuration with the database that :func:`use_database` noted, if it noted one."""
    note = data_dir / _DATABASE_NOTE
    if not note.exists():
        return billing
    return msgspec.structs.replace(billing, database_url=note.read_text())


def use_database(data_dir: Path, url: str) -> None:
    """Have gateways of this data directory use another database than the file in it."""
    (data_dir / _DATABASE_NOTE).write_text(url)


def open_books(data_dir: Path) -> Store:
    """The store that a gateway of this data directory has. Close it."""
    return Store.open(billing_in(data_dir).database_url_in(data_dir))


def prepare_data_dir(data_dir: Path) -> None:
    """A data directory with :func:`prepare_database`. Copy it: migrations take a while."""
    data_dir.mkdir(parents=True, exist_ok=True)
    prepare_database(BILLING.database_url_in(data_dir))


def prepare_database(url: str) -> None:
    """A store with two accounts and their tokens."""
    store = Store.open(url)
    directory = AccountDirectory(store)
    for account_id, token in ((ACCOUNT, TOKEN), (OTHER_ACCOUNT, OTHER_TOKEN)):
        directory.create_account("test", account_id)
        directory.import_token(account_id, token, "test")
    store.close()


async def _read(response: aiohttp.ClientResponse) -> Reply:
    body = bytearray()
    is_cut = False
    try:
        async for piece in response.content.iter_any():
            body += piece
    except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError):
        is_cut = True
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Reply(response.status, headers, bytes(body), is_cut)
