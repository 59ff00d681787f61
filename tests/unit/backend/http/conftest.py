"""Replicas on free ports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from backend.config import BackendConfig, ModelSource
from backend.server import ReplicaServer
from backend.text.tokenizer import Tokenizer
from tests.support.scripted_replica import Replica, ScriptedEngine, StartReplica


@pytest.fixture
def config(tmp_path: Path, definition: dict[str, Any], chatml: str) -> BackendConfig:
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    (tmp_path / "chat_template.jinja").write_text(chatml)
    return BackendConfig(
        replica_id="replica-0",
        model=ModelSource(path=str(tmp_path), served_as="@cf/test/model"),
        port=0,
        shutdown_grace_s=5.0,
    )


@pytest.fixture
async def start_replica(config: BackendConfig, tokenizer: Tokenizer) -> AsyncIterator[StartReplica]:
    """Start a replica with other settings."""
    started: list[Replica] = []

    async def start(
        *,
        telemetry: Any = None,
        token: str = "",
        loads: bool = True,
        engine_start_s: float = 0.0,
        **settings: Any,
    ) -> Replica:
        engine = ScriptedEngine()

        async def start_engine(_: BackendConfig, report: object) -> ScriptedEngine:
            await asyncio.sleep(engine_start_s)
            return engine

        own = msgspec.structs.replace(config, pool_token=token, **settings)
        server = ReplicaServer(own, start=start_engine, telemetry=telemetry)
        await server.listen()
        if loads:
            await server.load()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        session = aiohttp.ClientSession(f"http://127.0.0.1:{server.port}", headers=headers)
        started.append(Replica(server, engine, session, tokenizer, own))
        return started[-1]

    yield start
    for replica in started:
        await replica.session.close()
        await replica.server.close()


@pytest.fixture
async def replica(start_replica: StartReplica) -> Replica:
    return await start_replica()
