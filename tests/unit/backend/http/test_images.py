"""A replica whose model sees: images reach the engine, in their place of the prompt and counted."""

from __future__ import annotations

import asyncio
import base64
import random
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from backend.config import ModelSource, TextConfig
from tests.support.kimi_answers import END
from tests.support.kimi_text import spoken, tiny_ranks, tiny_tokenizer, write_kimi_text
from tests.support.scripted_replica import Answer, Replica, Script, StartReplica

PAD = tiny_tokenizer().special_tokens["<|media_pad|>"]


@pytest.fixture
async def seeing(start_replica: StartReplica, tmp_path: Path) -> Replica:
    directory = tmp_path / "kimi"
    directory.mkdir()
    write_kimi_text(directory)
    replica = await start_replica(
        loads=False,
        model=ModelSource(path=str(directory), served_as="@cf/test/model"),
        text=TextConfig(max_image_tokens=200, max_image_pixels=100_000),
    )
    info = replica.engine.info
    vocab_size = len(tiny_ranks()) + 256
    replica.engine.info = msgspec.structs.replace(
        info, has_vision=True, max_model_len=4096, vocab_size=vocab_size
    )
    await replica.server.load()
    replica.engine.scripts.append(Script(spoken("</think>a cat" + END)))
    return replica


def image_url(width: int = 100, height: int = 50, seed: int = 0) -> str:
    pixels = random.Random(seed).randbytes(width * height * 3)
    file = BytesIO()
    Image.frombytes("RGB", (width, height), pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


async def see(replica: Replica, *urls: str, **fields: Any) -> Answer:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts.append({"type": "text", "text": "What is it?"})
    return await replica.complete(messages=[{"role": "user", "content": parts}], **fields)


async def test_images_are_in_the_prompt_and_in_its_count(seeing: Replica) -> None:
    answer = await see(seeing, image_url(), image_url(28, 28, seed=1))
    assert answer.status == 200
    assert answer.json["choices"][0]["message"]["content"] == "a cat"
    (request,) = seeing.engine.requests
    assert answer.json["usage"]["prompt_tokens"] == len(request.prompt_token_ids)
    assert request.prompt_token_ids.count(PAD) == 9
    assert [span.num_tokens for span in request.media] == [8, 1]
    for span in request.media:
        assert request.prompt_token_ids[span.start : span.end] == [PAD] * span.num_tokens
    assert answer.json["usage"]["prompt_tokens_details"]["image_tokens"] == 9


async def test_a_text_has_no_images(seeing: Replica) -> None:
    answer = await see(seeing)
    assert seeing.engine.requests[0].media == ()
    assert "image_tokens" not in answer.json["usage"]["prompt_tokens_details"]


async def test_every_choice_gets_the_images(seeing: Replica) -> None:
    answer = await see(seeing, image_url(), n=3)
    assert [len(request.media) for request in seeing.engine.requests] == [1, 1, 1]
    assert answer.json["usage"]["prompt_tokens_details"]["image_tokens"] == 8, "a prompt is counted once"


async def test_choices_times_images_are_bounded(seeing: Replica) -> None:
    answer = await see(seeing, image_url(), n=26)
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, "n")
    assert "at most 25" in error["message"]
    assert not seeing.engine.requests


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("https://example.com/cat.png", "image_url_not_allowed"),
        ("http://127.0.0.1:1/", "image_url_not_allowed"),
        ("data:image/png;base64,QUJD", "invalid_value"),
        (image_url(400, 400), "invalid_value"),
    ],
)
async def test_images_that_cannot_be_read_are_refused_by_field(seeing: Replica, url: str, code: str) -> None:
    answer = await see(seeing, image_url(), url)
    error = answer.json["error"]
    assert (answer.status, error["code"]) == (400, code)
    assert error["param"] == "messages[0].content[1].image_url.url"
    assert not seeing.engine.requests


async def test_nothing_is_connected_to(seeing: Replica) -> None:
    connected: list[object] = []
    server = await asyncio.start_server(lambda *ends: connected.append(ends), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        for host in ("127.0.0.1", "localhost", "2130706433", "[::ffff:127.0.0.1]", "0.0.0.0"):
            answer = await see(seeing, f"http://{host}:{port}/cat.png")
            assert answer.json["error"]["code"] == "image_url_not_allowed"
        await asyncio.sleep(0.05)
    assert not connected


async def test_the_event_loop_goes_on_while_an_image_is_read(
    seeing: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    encode = Image.open

    def open_image(*arguments: Any, **options: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            threads.append(True)
        return encode(*arguments, **options)

    monkeypatch.setattr(Image, "open", open_image)
    assert (await see(seeing, image_url(2, 2))).status == 200
    assert threads == [True]
