"""From a message with an image to tokens, on a checkpoint in Kimi's own form."""

from __future__ import annotations

import base64
import itertools
import random
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from backend.config import BackendConfig, CacheConfig, DeviceConfig, ModelSource, SchedulerConfig
from backend.engine.engine import Engine
from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.runner import ModelRunner
from backend.model.tiny_checkpoint import TinyShape, write_tiny_checkpoint
from backend.text.media import ImageLimits
from backend.text.model_text import load_model_text
from backend.text.prompt import Conversation, ModelText, Prompt
from tests.support.kimi_text import tiny_ranks

MAX_MODEL_LEN = 512


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "int4"
    write_tiny_checkpoint(directory, "int4", tiny_ranks(), seed=5, shape=TinyShape(num_layers=2))
    return directory


@pytest.fixture(scope="module")
def text(checkpoint: Path) -> ModelText:
    vocab_size = len(tiny_ranks()) + 256
    return load_model_text(checkpoint, cache_chars=1000, vocab_size=vocab_size, image_limits=ImageLimits())


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> ModelRunner:
    return ModelRunner.load(settings(checkpoint, max_tokens_per_step=512))


def settings(checkpoint: Path, *, max_tokens_per_step: int) -> BackendConfig:
    return BackendConfig(
        replica_id="r0",
        model=ModelSource(path=str(checkpoint), served_as="tiny", max_model_len=MAX_MODEL_LEN),
        cache=CacheConfig(num_blocks=64),
        scheduler=SchedulerConfig(max_tokens_per_step=max_tokens_per_step, max_running=4),
        device=DeviceConfig(device="cpu", dtype="float32", threads=1),
    )


def engine_on(runner: ModelRunner, max_tokens_per_step: int = 512) -> Engine:
    config = settings(Path(), max_tokens_per_step=max_tokens_per_step)
    return Engine(runner, config, clock_s=time.monotonic, draw_seed=itertools.count().__next__)


def picture(seed: int, change: int | None = None) -> dict[str, Any]:
    pixels = bytearray(random.Random(seed).randbytes(150 * 120 * 3))
    if change is not None:
        pixels[change] ^= 255
    file = BytesIO()
    Image.frombytes("RGB", (150, 120), bytes(pixels)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def prompt_with(text: ModelText, *parts: Any) -> Prompt:
    return text.encode(
        Conversation([{"role": "user", "content": ["Look at this picture.", *parts, "Well?"]}])
    )


def generate(engine: Engine, prompt: Prompt) -> tuple[list[int], int]:
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    request = SequenceRequest(
        sequence_id=time.monotonic_ns(),
        prompt_token_ids=prompt.token_ids,
        sampling=sampling,
        media=prompt.media,
    )
    engine.submit(request)
    outputs = []
    while engine.has_work:
        engine.step()
        outputs += engine.take_outputs()
    assert outputs[-1].finish_reason == "length", outputs[-1].message
    return [token for output in outputs for token in output.token_ids], outputs[-1].cached_prompt_tokens


def test_one_pixel_makes_another_answer_and_shares_no_block_of_the_image(
    text: ModelText, runner: ModelRunner
) -> None:
    engine = engine_on(runner)
    first, other = prompt_with(text, picture(1)), prompt_with(text, picture(1, change=150 * 120 * 3 - 1))
    assert first.token_ids == other.token_ids
    assert generate(engine, first)[1] == 0
    (span,) = first.media
    assert span.num_tokens == 30
    before_image = span.start // 16 * 16
    assert before_image > 0
    assert generate(engine, other)[1] == before_image
    whole = (len(first.token_ids) - 1) // 16 * 16
    assert generate(engine, first)[1] == generate(engine, other)[1] == whole > before_image


def test_the_image_decides_and_chunks_do_not(text: ModelText, runner: ModelRunner) -> None:
    prompts = [prompt_with(text, picture(seed)) for seed in range(4)]
    whole = [generate(engine_on(runner), prompt)[0] for prompt in prompts]
    chunked = [generate(engine_on(runner, max_tokens_per_step=7), prompt)[0] for prompt in prompts]
    assert whole == chunked
    assert len({tuple(answer) for answer in whole}) > 1
