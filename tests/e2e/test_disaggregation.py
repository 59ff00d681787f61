"""Prompts computed by one replica and answered by another: two processes and a gateway."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.support.installation import MODEL, Installation
from tests.support.settled import settled_usage
from tests.support.split_installation import split_installation
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.slow]

LONG = "Once upon a time there was a small fire that nobody could put out. " * 40
MAX_TOKENS = 16


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with split_installation(tmp_path_factory.mktemp("installation"), ["prefill", "decode"]) as installation:
        yield installation


async def ask(installation: Installation, text: str, **fields: Any) -> dict[str, Any]:
    account = installation.account
    url = f"{installation.url}/client/v4/accounts/{account.account_id}/ai/v1/chat/completions"
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0}
    headers = {"authorization": f"Bearer {account.api_token}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body | {"max_tokens": MAX_TOKENS} | fields, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer | {"request_id": response.headers["cf-ai-req-id"]}


async def ask_replica(installation: Installation, name: str, text: str) -> str:
    """The same of one replica, without the gateway and with a salt of its own, so that nothing is shared."""
    token = (installation.layout.secrets_dir / "pool_token").read_text().strip()
    body = {
        "request_id": os.urandom(8).hex(),
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "cache_salt": "another",
    }
    headers = {"authorization": f"Bearer {token}"}
    url = f"{installation.process(name).url}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return text_of(await response.json())


def text_of(answer: dict[str, Any]) -> str:
    content = answer["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


async def count(installation: Installation, name: str, metric: str) -> float:
    """The sum of a metric of one replica over its labels; ``metric`` may end in a label."""
    url = f"{installation.process(name).url}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(metric, line))


IN = r"embergate_transfer_blocks_total\{direction=\"in\""
OUT = r"embergate_transfer_blocks_total\{direction=\"out\""


async def test_a_long_prompt_is_computed_elsewhere_and_answered_the_same(installation: Installation) -> None:
    expected = await ask_replica(installation, "replica-1", LONG)
    first = await ask(installation, LONG)
    assert text_of(first) == expected
    usage = first["usage"]
    num_blocks = (usage["prompt_tokens"] - 1) // 16
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert await count(installation, "replica-1", IN) == num_blocks
    assert await count(installation, "replica-0", OUT) == num_blocks

    again = await ask(installation, LONG)
    assert text_of(again) == expected
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == num_blocks * 16
    assert await count(installation, "replica-1", IN) == num_blocks, "what is there does not travel again"

    rows = await asyncio.to_thread(settled_usage, installation, "--by", "request")
    billed = {row["key"]: row for row in rows["rows"]}
    assert billed[first["request_id"]]["cached_prompt_tokens"] == 0
    assert billed[again["request_id"]]["cached_prompt_tokens"] == num_blocks * 16


async def test_short_prompts_stay_where_their_answer_is(installation: Installation) -> None:
    before = await count(installation, "replica-0", "vllm:prefix_cache_queries_total")
    await asyncio.gather(*(ask(installation, f"Say {word}.") for word in ("one", "two", "three")))
    assert await count(installation, "replica-0", "vllm:prefix_cache_queries_total") == before


async def test_killing_the_prefill_replica_costs_time_and_no_answer(installation: Installation) -> None:
    texts = [f"Story number {number}. {LONG}" for number in range(3)]
    expected = await ask_replica(installation, "replica-1", texts[0])
    running = [asyncio.create_task(ask(installation, text)) for text in texts]
    await asyncio.sleep(1.0)
    os.kill(installation.pid_of("replica-0"), signal.SIGKILL)
    answers = await asyncio.gather(*running)
    assert text_of(answers[0]) == expected
    await eventually(installation.is_ready, timeout_s=60)
    assert await count(installation, "replica-1", "embergate_kv_held_blocks") == 0
    assert await count(installation, "replica-1", "vllm:kv_cache_usage_perc") == 0
