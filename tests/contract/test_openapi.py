"""The OpenAPI document: it names every route and no other, and random requests find no answer it lacks."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks

from gateway.config import LimitsConfig, RateLimits
from gateway.openapi.whole import as_yaml, whole_document
from gateway.wire.workers_ai import ACCOUNT_PATHS
from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import ACCOUNT, EMBEDDINGS, MODEL, TOKEN, Harness, gateway_config

ROOT = Path(__file__).parents[2]
DOCUMENT = whole_document()
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]
EXAMPLES_PER_OPERATION = 6  # several hundred in all


class LiveGateway:
    """A gateway with a scripted replica on a loop of its own, for clients that block."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.url = ""

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        self._replica = FakeReplica("replica-0")
        await self._replica.start()
        limits = LimitsConfig(default=RateLimits(requests_per_minute=100_000))
        self._harness = Harness(self._data_dir, [self._replica], gateway_config(limits=limits))
        await self._harness.start()
        self.url = self._harness.root("")

    async def _stop(self) -> None:
        await self._harness.stop()
        await self._replica.stop()


@pytest.fixture(scope="module")
def live(prepared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    data_dir = Path(shutil.copytree(prepared_dir, tmp_path_factory.mktemp("openapi") / "data"))
    live = LiveGateway(data_dir)
    live.start()
    yield live
    live.stop()


def make_reach(case: Any) -> None:
    """Let random requests reach a handler: with the account that there is and, mostly, a model."""
    if "account_id" in case.path_parameters:
        case.path_parameters["account_id"] = ACCOUNT
    model = EMBEDDINGS if "embeddings" in case.path else MODEL
    if "model" in case.path_parameters and len(case.path_parameters["model"]) % 2:
        case.path_parameters["model"] = model
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = model


@pytest.mark.slow
@SCHEMA.parametrize()
@settings(
    max_examples=EXAMPLES_PER_OPERATION,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_random_requests_find_no_failure_and_no_undeclared_answer(case: Any, live: LiveGateway) -> None:
    make_reach(case)
    headers = {"authorization": f"Bearer {TOKEN}", **(case.headers or {})}
    case.call_and_validate(base_url=live.url, headers=headers, checks=CHECKS, timeout=30)


async def test_the_document_names_every_route_and_no_other(gateway: Harness) -> None:
    """The catch-alls stand for the inference routes below an account and for nothing at all."""
    assert gateway.gateway is not None
    application = gateway.gateway.server._runner.app
    served = {
        (route.method.lower(), route.resource.canonical)
        for route in application.router.routes()
        if route.resource is not None
        and route.method not in ("HEAD", "*")
        and route.name not in ("inference", "no-route")
        and not route.resource.canonical.startswith("/dashboard")
    } | {("post", path) for path in ACCOUNT_PATHS}
    described = {(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert served == described


async def test_it_is_served_to_everyone(gateway: Harness) -> None:
    reply = await gateway.get(gateway.root("/openapi.json"), token=None)
    assert reply.status == 200
    assert reply.json == DOCUMENT


def test_the_page_is_fresh() -> None:
    assert (ROOT / "docs/openapi.yaml").read_text() == as_yaml(), "run `make docs`"


def test_every_reference_leads_somewhere() -> None:
    for kind, name in set(re.findall(r"#/components/(\w+)/([\w.]+)", str(DOCUMENT))):
        assert name in DOCUMENT["components"][kind]
