"""Kimi K2.5 in small, in its own checkpoint format, behind the whole gateway: random text, exact books."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.chat import ChatClient, Outcome
from tests.support.example_runs import DIFF, billed, run_example
from tests.support.installation import MODEL, ROOT, Installation
from tests.support.settled import settled_totals

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.slow]

TINY = "kimi-k2.5-tiny"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SHORT = {"temperature": 0, "max_tokens": 12}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def picture(colour: str, *, pixel: str = "") -> dict[str, Any]:
    """A part that holds an image of 224 by 224 pixels, one of which may be of another colour."""
    image = Image.new("RGB", (224, 224), colour)
    if pixel:
        image.putpixel((100, 100), tuple(bytes.fromhex(pixel)))
    file = BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def about(image: dict[str, Any]) -> list[dict[str, Any]]:
    """A question about an image, with enough text before it to fill a block."""
    system = {"role": "system", "content": "You look at pictures and say in one short sentence what you see."}
    question = {"type": "text", "text": "What is in the picture?"}
    return [system, {"role": "user", "content": [image, question]}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    installation = Installation(tmp_path_factory.mktemp("tiny"), TINY)
    installation.up()
    yield installation
    installation.down()
    assert installation.own_processes() == []


def counts(outcome: Outcome) -> tuple[int, int]:
    return outcome.prompt_tokens, outcome.completion_tokens


async def test_it_answers_on_both_surfaces_whole_and_streamed(tiny: Installation) -> None:
    before = await settled_totals(tiny)
    async with ChatClient(tiny.account) as client:
        outcomes = [
            await ask(TINY, QUESTION, stream=is_stream, **SHORT)
            for ask in (client.run, client.complete)
            for is_stream in (False, True)
        ]
    for outcome in outcomes:
        assert outcome.is_complete, outcome
        assert 1 <= outcome.completion_tokens <= 12
        assert outcome.finish_reason == ("length" if outcome.completion_tokens == 12 else "stop")
    # Seven tokens at least are the template's: role, name and middle of both turns, end of turn, <think>.
    assert outcomes[0].prompt_tokens > 10
    assert len({counts(outcome) for outcome in outcomes}) == 1
    after = await settled_totals(tiny, before["num_requests"] + 4)
    assert after["prompt_tokens"] - before["prompt_tokens"] == 4 * outcomes[0].prompt_tokens
    assert after["completion_tokens"] - before["completion_tokens"] == 4 * outcomes[0].completion_tokens
    assert after["amount_nanos"] > before["amount_nanos"]
    assert tiny.run("audit").returncode == 0


async def test_tools_are_taken_in_and_cost_prompt_tokens(tiny: Installation) -> None:
    async with ChatClient(tiny.account) as client:
        plain = await client.complete(TINY, QUESTION, **SHORT)
        for is_stream in (False, True):
            asked = await client.complete(
                TINY, QUESTION, stream=is_stream, tools=[TOOL], tool_choice="auto", **SHORT
            )
            assert asked.is_complete, asked
            assert asked.prompt_tokens > plain.prompt_tokens + 20


async def test_images_are_seen_and_counted_on_both_surfaces_whole_and_streamed(tiny: Installation) -> None:
    before = await settled_totals(tiny)
    messages = about(picture("red"))
    async with ChatClient(tiny.account) as client:
        plain = await client.complete(TINY, [messages[0], QUESTION[0]], **SHORT)
        outcomes = [
            await ask(TINY, messages, session="eyes", stream=is_stream, **SHORT)
            for ask in (client.run, client.complete)
            for is_stream in (False, True)
        ]
    for outcome in outcomes:
        assert outcome.is_complete, outcome
        # 64 tokens of 28 by 28 pixels, and the marks around them.
        assert outcome.usage["prompt_tokens_details"]["image_tokens"] == 64
        assert 64 < outcome.prompt_tokens - plain.prompt_tokens < 84
    assert len({(counts(outcome), outcome.text) for outcome in outcomes}) == 1
    after = await settled_totals(tiny, before["num_requests"] + 5)
    num_images = sum(outcome.prompt_tokens for outcome in outcomes)
    assert after["prompt_tokens"] - before["prompt_tokens"] == num_images + plain.prompt_tokens
    assert tiny.run("audit").returncode == 0


async def test_the_same_image_hits_the_cache_and_another_shares_none_of_its_blocks(
    tiny: Installation,
) -> None:
    """BR-7: prefix caching by what an image shows, down to one pixel."""
    red, other = about(picture("blue")), about(picture("blue", pixel="0000fe"))
    async with ChatClient(tiny.account) as client:
        first = await client.complete(TINY, red, session="cache", **SHORT)
        again = await client.run(TINY, red, session="cache", stream=True, **SHORT)
        pixel = await client.complete(TINY, other, session="cache", **SHORT)
        alone = await client.complete(TINY, other, session="cache", **SHORT)
    block = tiny.config["replicas"]["cache"]["block_size"]
    assert (first.replica, again.replica, pixel.replica) == (first.replica,) * 3
    assert again.prompt_tokens == pixel.prompt_tokens == first.prompt_tokens
    # All whole blocks but the one that the last token is in.
    assert again.cached_tokens == (first.prompt_tokens - 1) // block * block
    # The system message comes before the image; of the image's own 64 tokens nothing is shared.
    before_image = first.prompt_tokens - 64
    assert pixel.cached_tokens < before_image
    assert pixel.cached_tokens + 64 <= again.cached_tokens
    assert alone.cached_tokens == again.cached_tokens


async def test_images_that_are_elsewhere_or_broken_are_refused_by_name(tiny: Installation) -> None:
    elsewhere = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8gd29ybGQh"}}
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    async with ChatClient(tiny.account) as client:
        for part, said in (
            (elsewhere, "'/messages/1/content/0/image_url/url': image_url_not_allowed"),
            (broken, "'/messages/1/content/0/image_url/url': is not a PNG, JPEG, WebP or GIF image"),
            (video, "'/messages/1/content/0/type': no model here takes video"),
        ):
            for is_stream in (False, True):
                outcome = await client.complete(TINY, about(part), stream=is_stream, **SHORT)
                assert outcome.status == 400
                assert said in outcome.error


def test_the_scorecard_is_met_as_far_as_random_weights_go(tiny: Installation, tmp_path: Path) -> None:
    """``make verify-kimi`` against what runs here: every row about the form of answers."""
    account, card = tiny.account, tmp_path / "card.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "loadtest.verify_kimi", "--random-weights", "--limit", "5",
            "--url", f"{account.url}/client/v4/accounts/{account.account_id}/ai/v1", "--model", TINY,
            "--max-tokens", "64", "--out", str(card),
        ],
        env={**os.environ, "EMBERGATE_API_TOKEN": account.api_token, "COLUMNS": "200"},
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The weights are random" in done.stdout
    assert account.api_token not in done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads(card.read_text())["rows"]}
    assert rows["trigger F1"]["verdict"] == "not asserted"
    assert rows["arguments, forced"]["counts"]["good"] >= 1
    assert rows["streamed = whole"]["value"] == 1.0
    assert rows["refusals"]["value"] == 1.0
    assert rows["images"]["counts"] == {"good": 1}


def test_an_agent_reads_files_with_tools_and_writes_a_review(tiny: Installation) -> None:
    options = ("--model", TINY, "--max-file-chars", "400", "--max-tokens", "1500")
    review, errors = run_example(tiny.account, "code_review.py", *options, stdin=DIFF)
    assert "  reads kernels/" in errors
    assert review["verdict"] in ("approve", "comment", "request_changes")
    bill = billed(errors)
    assert bill["num_requests"] >= 2
    assert bill["cached_percent"] > 25
    assert bill["saved"] > 0


async def test_the_other_model_of_the_catalog_is_not_served(tiny: Installation) -> None:
    async with ChatClient(tiny.account) as client:
        assert (await client.complete(MODEL, QUESTION, **SHORT)).status in (400, 404)
    rows = {row["id"]: row for row in tiny.run_json("models", "list")}
    assert rows[MODEL]["replicas"] == []
    assert rows[TINY]["replicas"] == ["replica-0", "replica-1"]
    assert rows[TINY]["state"] == "ready"
