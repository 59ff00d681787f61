"""The security review over fifty files, four at once on four replicas: with affinity, and without."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backend.text.model_text import ModelText, load_model_text
from billing.config import PriceListConfig
from embergate.layout import DataLayout
from gateway.config import LimitsConfig, RateLimits
from gateway.routing import RendezvousRanking
from tests.support.caching_replica import CachingReplica
from tests.support.gateway_harness import (
    ACCOUNT,
    BILLING,
    MODEL,
    TOKEN,
    Harness,
    gateway_config,
    prepare_data_dir,
)
from tests.support.installation import ROOT, prepared_models

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.slow]

NUM_FILES = 50
FOCUSES = ("injection", "secrets", "access", "resources")
ANSWER = {"risk": "low", "findings": [{"line": 7, "kind": "access", "why": "nobody is asked"}]}
ELSEWHERE = PriceListConfig(
    name="Another card",
    source="a page",
    as_of="2026-08-28",
    input="6.00",
    cached_input="1.00",
    output="30.00",
)


@pytest.fixture(scope="module")
def text() -> ModelText:
    """The embedded model's tokenizer."""
    directory = DataLayout(prepared_models().parent).embedded_checkpoint("kimi")
    return load_model_text(directory, cache_chars=1_000_000, vocab_size=49_152)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Sixty small files with names long enough for a map of some length."""
    root = tmp_path / "repository"
    root.mkdir()
    for number in range(60):
        name = f"handler_of_requests_about_subject_{number:02d}.py"
        (root / name).write_text(f"def handle_{number}(request):\n    return query(request.text, {number})\n")
    return root


@pytest.fixture
async def gateway(tmp_path: Path, text: ModelText) -> AsyncIterator[Harness]:
    """Four replicas, each with room for one review's prefix and a half."""
    replicas = [CachingReplica(f"replica-{number}", text, 100, ANSWER) for number in range(4)]
    for replica in replicas:
        await replica.start()
    prepare_data_dir(tmp_path / "data")
    limits = LimitsConfig(default=RateLimits(requests_per_minute=10_000))
    billing = msgspec.structs.replace(BILLING, comparisons=[ELSEWHERE])
    harness = Harness(tmp_path / "data", replicas, gateway_config(limits=limits), billing=billing)
    await harness.start()
    yield harness
    await harness.stop()
    for replica in replicas:
        await replica.stop()


def sessions_of(gateway: Harness) -> list[str]:
    """An affinity key for each replica, as many reviews would have on the average."""
    ranking = RendezvousRanking()
    assert gateway.gateway is not None
    candidates = list(gateway.gateway.table.serving(MODEL))
    found: dict[str, str] = {}
    for number in range(200):
        key = f"review-{number}"
        found.setdefault(ranking(ACCOUNT, key, candidates)[0].id, key)
    assert len(found) == 4
    return list(found.values())


async def review(gateway: Harness, repository: Path, *options: str) -> Any:
    """What a run of the example prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "examples" / "security_review.py"), "--repository", str(repository),
        "--model", MODEL, "--parallel", "1", *options,
        env={"EMBERGATE_URL": gateway.root(""), "EMBERGATE_ACCOUNT_ID": ACCOUNT, "EMBERGATE_API_TOKEN": TOKEN,
             "PATH": os.environ["PATH"]},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return json.loads(out)


async def four_reviews(gateway: Harness, repository: Path, *options: str) -> list[Any]:
    orders = zip(FOCUSES, sessions_of(gateway), strict=True)
    names = [("--focus", focus, "--session", session + "".join(options)) for focus, session in orders]
    return await asyncio.gather(*(review(gateway, repository, *name, *options) for name in names))


def cached_share(runs: list[Any]) -> float:
    num_cached = sum(run["bill"]["num_cached"] for run in runs)
    return float(num_cached / (num_cached + sum(run["bill"]["num_input"] for run in runs)))


async def test_affinity_keeps_a_review_on_its_prefix(gateway: Harness, repository: Path) -> None:
    kept = await four_reviews(gateway, repository)
    lost = await four_reviews(gateway, repository, "--no-affinity")
    for run in (*kept, *lost):
        assert len(run["files"]) == run["bill"]["num_requests"] == NUM_FILES
        assert all(report == ANSWER for report in run["files"].values())
    assert min(run["bill"]["cached_share"] for run in kept) > 0.8
    assert cached_share(lost) < cached_share(kept) / 2
    assert sum(run["bill"]["amount"] for run in kept) < 0.6 * sum(run["bill"]["amount"] for run in lost)
    for run in kept:
        bill = run["bill"]
        # 0.60, 0.10 and 3.00 dollars a million tokens; the other card asks ten times as much.
        expected = bill["num_input"] * 600 + bill["num_cached"] * 100 + bill["num_output"] * 3_000
        assert bill["amount"] == expected
        assert bill["undiscounted"] - bill["amount"] == bill["num_cached"] * 500
        assert bill["elsewhere"] == {"Another card": 10 * expected}
