"""A long prompt does not hold up the streams of others."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from tests.support.scripted_replica import Replica, StartReplica


@pytest.fixture
def blockbuster() -> Iterator[BlockBuster]:
    with blockbuster_ctx("backend.http") as found:
        yield found


async def longest_pause(stop: asyncio.Event) -> float:
    """The longest time that the event loop was away."""
    longest = 0.0
    before = time.perf_counter()
    while not stop.is_set():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest = max(longest, now - before)
        before = now
    return longest


async def test_the_event_loop_goes_on_while_a_long_prompt_is_encoded(
    start_replica: StartReplica, blockbuster: BlockBuster
) -> None:
    replica = await start_replica()
    words = "The quick brown fox jumps over 13 lazy dogs; hello world, 삼겹살! "
    content = (words * 2000)[:100_000]
    began = time.perf_counter()
    await asyncio.to_thread(replica.tokenizer.encode_text, content)
    encoding_s = time.perf_counter() - began
    stop = asyncio.Event()
    watch = asyncio.create_task(longest_pause(stop))
    answer = await replica.complete(messages=[{"role": "user", "content": content}])
    stop.set()
    assert answer.json["error"]["code"] == "context_length_exceeded"
    # Encoding alone takes longer than the loop was away: it happened beside it.
    assert await watch < max(0.05, encoding_s / 2)


async def test_no_handler_blocks_the_event_loop(replica: Replica, blockbuster: BlockBuster) -> None:
    replica.say("hello world")
    assert (await replica.complete(stream=True)).text() == "hello world"
    assert (await replica.complete()).status == 200
    for path in ("/health", "/stats", "/usages", "/metrics"):
        assert (await replica.call("GET", path)).status == 200


def test_the_http_process_imports_no_torch() -> None:
    code = (
        "import sys, backend.__main__; print([m for m in ('torch', 'triton', 'kernels') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
