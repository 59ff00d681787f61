"""Images in prompts: what the model computes of them, and who may share it."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from backend.config import BackendConfig, CacheConfig, DeviceConfig, ModelSource, SchedulerConfig
from backend.engine.engine import Engine
from backend.engine.forward_batch import build_forward_batch
from backend.engine.media_embeddings import MediaEmbeddings, build_overlay
from backend.engine.messages import MediaSpan, SamplingParams, SequenceRequest, TokenOutput
from backend.engine.runner import ModelRunner
from backend.engine.step import ScheduledChunk, StepPlan
from backend.model.loader import load_model
from backend.model.placement import Placement
from backend.model.vision import Grid, VisionTower
from backend.model.vision_config import VisionConfig
from backend.model.weights import WeightReader
from tests.support.tiny_models import write_tiny_kimi

PAD = 9
GRID = Grid(6, 10)
NUM_TOKENS = 15
SHAPE = VisionConfig(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, patch_size=14, grid_height=8,
    grid_width=8, max_frames=4, merge_size=2, projector_eps=1e-5, out_size=64,
)  # fmt: skip
CPU = Placement(torch.device("cpu"), torch.float32)


class RandomReader(WeightReader):
    """Gives weights of whatever shape is asked for."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(4)

    def tensor(self, name: str, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator) * 0.3

    def vector(self, name: str, size: int) -> Tensor:
        return self.tensor(name, size)

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self.tensor(name, rows, columns)


@pytest.fixture(scope="module")
def tower() -> VisionTower:
    return VisionTower(SHAPE, RandomReader(), CPU)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("kimi")
    return directory, write_tiny_kimi(directory)


@pytest.fixture
def runner(checkpoint: tuple[Path, Any], tower: VisionTower) -> ModelRunner:
    with torch.inference_mode():
        model = load_model(checkpoint[0], 512, lambda config: CPU)
    return ModelRunner(replace(model, vision=tower), 512)


def image(start: int, seed: int = 0) -> MediaSpan:
    pixels = torch.randint(0, 256, (GRID.num_patches * 588,), generator=torch.Generator().manual_seed(seed))
    return MediaSpan(
        start=start,
        num_tokens=NUM_TOKENS,
        rows=GRID.rows,
        columns=GRID.columns,
        patches=bytes(pixels.tolist()),
        digest=bytes([seed]) * 32,
    )


def prompt(length: int, *starts: int) -> list[int]:
    token_ids = torch.randint(10, 256, (length,), generator=torch.Generator().manual_seed(8)).tolist()
    for start in starts:
        token_ids[start : start + NUM_TOKENS] = [PAD] * NUM_TOKENS
    return token_ids


def pixels_of(span: MediaSpan) -> Tensor:
    return torch.tensor(list(span.patches), dtype=torch.uint8).view(-1, 3, 14, 14)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert (actual - expected).abs().max() / expected.abs().max() < 1e-4


class TestLogits:
    @torch.inference_mode()
    def expected(self, reference: Any, tower: VisionTower, ids: list[int], spans: list[MediaSpan]) -> Tensor:
        embeddings = reference.get_input_embeddings()(torch.tensor([ids]))
        for span in spans:
            embeddings[0, span.start : span.end] = tower.encode(pixels_of(span), GRID)
        return reference(inputs_embeds=embeddings).logits[0]

    def test_images_are_read_whole_and_in_chunks(
        self, runner: ModelRunner, tower: VisionTower, checkpoint: tuple[Path, Any]
    ) -> None:
        spans = [image(5, 1), image(40, 2)]
        ids = prompt(70, 5, 40)
        expected = self.expected(checkpoint[1], tower, ids, spans)
        runner.allocate_kv(64, 16)

        def chunk(start: int, end: int, blocks: range) -> ScheduledChunk:
            media = tuple(span for span in spans if span.start < end and start < span.end)
            return ScheduledChunk(1, ids[start:end], start, list(blocks), True, media)

        for number, bounds in enumerate(((0, 70), (0, 8, 21, 48, 49, 70), (0, 5, 20, 40, 55, 70))):
            blocks = range(5 * number, 5 * number + 5)
            for start, end in itertools.pairwise(bounds):
                logits = runner.execute(StepPlan((chunk(start, end, blocks),)))
                assert_close(logits[0], expected[end - 1])
        # Beside another sequence that decodes, whose token comes first in the batch.
        other = ScheduledChunk(2, [11], 0, [30], True)
        logits = runner.execute(StepPlan((chunk(0, 30, range(20, 25)), other)))
        assert_close(logits[0], expected[29])

    def test_every_image_is_embedded_once(self, runner: ModelRunner, tower: VisionTower) -> None:
        media = MediaEmbeddings(tower, 1 << 20)
        for start, end in ((0, 12), (12, 18), (18, 30)):
            chunk = ScheduledChunk(1, prompt(30, 5)[start:end], start, [0, 1], False, (image(5),))
            plan = StepPlan((chunk,))
            assert build_overlay(plan, build_forward_batch(plan, 16, CPU.device), media) is not None
        assert media.num_computed == 1


class TestEmbeddings:
    def test_what_is_kept_is_bounded_and_the_last_used_stays(self, tower: VisionTower) -> None:
        media = MediaEmbeddings(tower, 2 * NUM_TOKENS * 64 * 4)
        for seed in (1, 2, 1, 3, 1):
            media.embed(image(0, seed), b"")
        assert media.num_computed == 3
        assert media.num_bytes == 2 * NUM_TOKENS * 64 * 4
        media.embed(image(0, 2), b"")
        assert media.num_computed == 4

    def test_a_large_one_is_kept_for_the_rest_of_its_prompt(self, tower: VisionTower) -> None:
        media = MediaEmbeddings(tower, 1)
        media.embed(image(0), b"")
        media.embed(image(0), b"")
        assert media.num_computed == 1

    def test_accounts_share_nothing(self, tower: VisionTower) -> None:
        media = MediaEmbeddings(tower, 1 << 20)
        media.embed(image(0), b"one")
        media.embed(image(0), b"other")
        assert media.num_computed == 2

    def test_an_entry_of_another_length_is_no_match(self, tower: VisionTower) -> None:
        media = MediaEmbeddings(tower, 1 << 20)
        first = image(0)
        media.embed(first, b"")
        small = msgspec.structs.replace(
            first, num_tokens=1, rows=2, columns=2, patches=first.patches[: 4 * 588]
        )
        assert media.embed(small, b"").shape == (1, 64)
        assert media.num_computed == 2
        assert media.num_bytes == 64 * 4

    @pytest.mark.parametrize("changes", [{"num_tokens": 14}, {"patches": b"x"}, {"rows": 8}])
    def test_patches_that_do_not_fit_are_refused(self, tower: VisionTower, changes: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="media: "):
            MediaEmbeddings(tower, 1).embed(msgspec.structs.replace(image(0), **changes), b"")


def build_engine(runner: ModelRunner, **scheduler: Any) -> Engine:
    config = BackendConfig(
        replica_id="r0",
        model=ModelSource(path="", served_as="tiny", max_model_len=512),
        cache=CacheConfig(num_blocks=64),
        scheduler=SchedulerConfig(**{"max_tokens_per_step": 32, "max_running": 4} | scheduler),
        device=DeviceConfig(device="cpu"),
    )
    return Engine(runner, config, clock_s=time.monotonic, draw_seed=itertools.count().__next__)


def ask(engine: Engine, ids: list[int], *media: MediaSpan, salt: bytes = b"") -> tuple[list[int], int]:
    """The greedy answer, and how much of the prompt was cached."""
    outputs = submit(engine, ids, *media, salt=salt)
    while engine.has_work:
        engine.step()
        outputs += engine.take_outputs()
    engine.check_invariants()
    assert outputs[-1].finish_reason == "length", outputs[-1].message
    return [token for output in outputs for token in output.token_ids], outputs[-1].cached_prompt_tokens


_ids = itertools.count()


def submit(engine: Engine, ids: list[int], *media: MediaSpan, salt: bytes = b"") -> list[TokenOutput]:
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    engine.submit(
        SequenceRequest(
            sequence_id=next(_ids), prompt_token_ids=ids, sampling=sampling, media=media, cache_salt=salt
        )
    )
    return engine.take_outputs()


class TestSharing:
    def test_the_same_text_with_another_image_shares_no_block_of_the_image(self, runner: ModelRunner) -> None:
        engine = build_engine(runner)
        ids = prompt(90, 40)
        answer, cached = ask(engine, ids, image(40, 1))
        assert cached == 0
        assert ask(engine, ids, image(40, 1)) == (answer, 80)
        # The image begins within the third block of 16: the first two are text alone.
        other, cached = ask(engine, ids, image(40, 2))
        assert cached == 32
        assert other != answer
        assert ask(engine, ids, image(40, 2)) == (other, 80)
        assert ask(engine, ids)[1] == 32

    def test_answers_are_those_of_an_empty_cache(self, checkpoint: Any, tower: VisionTower) -> None:
        def fresh() -> Engine:
            with torch.inference_mode():
                model = load_model(checkpoint[0], 512, lambda config: CPU)
            return build_engine(ModelRunner(replace(model, vision=tower), 512))

        ids, warm = prompt(90, 3, 40), fresh()
        pairs = [(1, 2), (1, 3), (2, 1), (1, 2)]
        cached = [ask(warm, ids, image(3, first), image(40, second)) for first, second in pairs]
        cold = [ask(fresh(), ids, image(3, first), image(40, second)) for first, second in pairs]
        assert [answer for answer, _ in cached] == [answer for answer, _ in cold]
        assert [num for _, num in cached] == [0, 32, 0, 80]

    def test_the_place_of_an_image_counts(self, runner: ModelRunner) -> None:
        engine = build_engine(runner)
        # Placeholders everywhere: only the spans say where the image is.
        ids = [PAD] * 64
        ask(engine, ids, image(16, 1))
        assert ask(engine, ids, image(17, 1))[1] == 16

    def test_accounts_share_no_image(self, runner: ModelRunner) -> None:
        engine = build_engine(runner)
        ids = prompt(90, 40)
        ask(engine, ids, image(40), salt=b"one")
        assert ask(engine, ids, image(40), salt=b"other")[1] == 0


class TestRefusals:
    def test_images_have_a_bounded_room(self, runner: ModelRunner) -> None:
        one = GRID.num_patches * 588
        engine = build_engine(runner, max_media_bytes=2 * one)
        ids = prompt(60, 20)
        assert submit(engine, ids, image(20)) == []
        assert submit(engine, ids, image(20)) == []
        assert submit(engine, ids) == []
        (refused,) = submit(engine, ids, image(20))
        assert refused.refusal == "queue_full"
        while engine.has_work:
            engine.step()
        engine.take_outputs()
        engine.check_invariants()
        assert submit(engine, ids, image(20)) == []

    @pytest.mark.parametrize(
        "media",
        [
            (image(50),),
            (image(-1),),
            (image(20), image(30)),
            (msgspec.structs.replace(image(20), digest=b"short"),),
            (msgspec.structs.replace(image(20), num_tokens=0),),
        ],
    )
    def test_spans_that_cannot_be_are_refused(
        self, runner: ModelRunner, media: tuple[MediaSpan, ...]
    ) -> None:
        (refused,) = submit(build_engine(runner), prompt(60, 20), *media)
        assert refused.refusal == "invalid_request"
        assert refused.message.startswith("media: ")

    def test_a_model_without_a_tower_takes_none(self, checkpoint: tuple[Path, Any]) -> None:
        with torch.inference_mode():
            model = load_model(checkpoint[0], 512, lambda config: CPU)
        (refused,) = submit(build_engine(ModelRunner(model, 512)), prompt(60, 20), image(20))
        assert refused.message == "media: this model takes text only"
