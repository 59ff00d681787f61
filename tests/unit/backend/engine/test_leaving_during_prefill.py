"""A client leaves while its prompt is computed: the real model made slow, in the engine's own loop."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from backend.config import BackendConfig, CacheConfig, DeviceConfig, ModelSource
from backend.engine import worker
from backend.engine.frames import FrameBuffer, encode_frame
from backend.engine.messages import (
    AbortSequences,
    Configure,
    EngineInfo,
    EngineStats,
    FromEngine,
    SamplingParams,
    SequenceRequest,
    StartFailed,
    StepOutputs,
    TokenOutput,
)
from backend.engine.runner import ModelRunner
from backend.model.loader import load_model
from backend.model.placement import Placement
from backend.model.transformer import Mlp
from tests.support.engine_driver import engine_on, generate
from tests.support.tiny_models import write_tiny_kimi, write_tiny_llama

NUM_LAYERS = 12
NUM_BLOCKS = 32
MAX_MODEL_LEN = 256
MAX_TOKENS = 8
PAUSE_S = 0.08
"""Of one layer; a step takes NUM_LAYERS of them."""
LIMIT_S = 0.2


@dataclass
class Brake:
    """Makes every layer slow while it is on; ``engaged`` is set when the first one has begun."""

    is_on: bool = False
    engaged: threading.Event = field(default_factory=threading.Event)


class SlowMlp:
    """An MLP that takes its time."""

    def __init__(self, mlp: Mlp, brake: Brake) -> None:
        self._mlp, self._brake = mlp, brake

    def __call__(self, x: Tensor) -> Tensor:
        if self._brake.is_on:
            self._brake.engaged.set()
            time.sleep(PAUSE_S)
        return self._mlp(x)


class Engine:
    """The other end of an engine process's socket; the process's body runs in a thread of this one."""

    def __init__(self, checkpoint: Path, brake: Brake) -> None:
        self._checkpoint, self._brake = checkpoint, brake
        self._sock, self._theirs = socket.socketpair()
        self._sock.settimeout(20)
        self._frames = FrameBuffer()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._received: list[FromEngine] = []
        self.stats = EngineStats()
        self.outputs: dict[int, list[TokenOutput]] = {}
        self._thread = threading.Thread(target=lambda: worker.serve(self._theirs, self._load))

    def start(self) -> None:
        self._thread.start()
        config = BackendConfig(
            replica_id="r0",
            model=ModelSource(path=str(self._checkpoint), served_as="m", max_model_len=MAX_MODEL_LEN),
            cache=CacheConfig(num_blocks=NUM_BLOCKS),
            device=DeviceConfig(device="cpu", threads=1),
        )
        self._sock.sendall(encode_frame(Configure(config)))
        while not isinstance(message := self._receive(), EngineInfo):
            assert not isinstance(message, StartFailed), message.message

    def close(self) -> None:
        self._sock.close()
        self._thread.join(20)
        self._theirs.close()
        assert not self._thread.is_alive()

    def submit(self, sequence_id: int, prompt: list[int], max_tokens: int = MAX_TOKENS) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = SequenceRequest(sequence_id=sequence_id, prompt_token_ids=prompt, sampling=sampling)
        self._sock.sendall(encode_frame(request))

    def abort(self, sequence_id: int) -> float:
        """Stop a sequence; the seconds until it was said to be over."""
        began = time.perf_counter()
        self._sock.sendall(encode_frame(AbortSequences([sequence_id])))
        assert self.finish(sequence_id)[-1].finish_reason == "abort"
        return time.perf_counter() - began

    def finish(self, sequence_id: int) -> list[TokenOutput]:
        """Read until the sequence is over."""
        outputs = self.outputs.setdefault(sequence_id, [])
        while not outputs or outputs[-1].finish_reason is None:
            self._receive()
        return outputs

    def tokens(self, sequence_id: int) -> list[int]:
        return [token for output in self.finish(sequence_id) for token in output.token_ids]

    @property
    def num_used(self) -> int:
        return self.stats.num_blocks - self.stats.num_free_blocks - self.stats.num_cached_blocks

    def _receive(self) -> FromEngine:
        while not self._received:
            data = self._sock.recv(65536)
            assert data, "the engine closed the socket"
            self._received += [self._decoder.decode(payload) for payload in self._frames.feed(data)]
        message = self._received.pop(0)
        if isinstance(message, StepOutputs):
            self.stats = message.stats
            for output in message.outputs:
                self.outputs.setdefault(output.sequence_id, []).append(output)
        return message

    def _load(self, config: BackendConfig, report: object) -> ModelRunner:
        torch.set_num_threads(1)
        model = load_model(
            self._checkpoint, MAX_MODEL_LEN, lambda _: Placement(torch.device("cpu"), torch.float32)
        )
        layers = tuple(replace(layer, mlp=SlowMlp(layer.mlp, self._brake)) for layer in model.layers)
        return ModelRunner(replace(model, layers=layers), MAX_MODEL_LEN)


@dataclass
class House:
    """A served checkpoint, and what it says without a brake."""

    engine: Engine
    brake: Brake
    reference: Callable[[list[int]], list[int]]


@pytest.fixture(scope="module", params=["llama", "kimi"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    write = write_tiny_llama if request.param == "llama" else write_tiny_kimi
    write(directory, num_hidden_layers=NUM_LAYERS)
    return directory


@pytest.fixture
def house(checkpoint: Path) -> Iterator[House]:
    brake = Brake()
    engine = Engine(checkpoint, brake)
    engine.start()

    def reference(prompt: list[int]) -> list[int]:
        alone = engine_on(checkpoint, max_model_len=MAX_MODEL_LEN, num_blocks=NUM_BLOCKS)
        return generate(alone, [prompt], max_tokens=MAX_TOKENS)[0]

    yield House(engine, brake, reference)
    brake.is_on = False
    engine.close()


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 256) for _ in range(length)]


@pytest.mark.slow
def test_its_blocks_are_free_at_once_and_serve_the_next_one(house: House) -> None:
    engine, brake = house.engine, house.brake
    brake.is_on = True
    engine.submit(1, prompt_of(240, 1))
    assert brake.engaged.wait(10)
    assert engine.abort(1) < LIMIT_S
    assert engine.num_used == 0
    assert engine.stats.num_free_blocks == NUM_BLOCKS

    brake.is_on = False
    following = prompt_of(245, 2)
    engine.submit(2, following)
    assert engine.tokens(2) == house.reference(following)


@pytest.mark.slow
def test_one_of_two_leaves_and_the_other_gets_what_it_would_have_got(house: House) -> None:
    engine, brake = house.engine, house.brake
    brake.is_on = True
    engine.submit(1, prompt_of(10, 0), max_tokens=1)
    assert brake.engaged.wait(10)
    engine.submit(2, prompt_of(100, 1))
    engine.submit(3, prompt_of(120, 2))
    engine.finish(1)
    brake.engaged.clear()
    assert brake.engaged.wait(10)
    assert engine.abort(2) < LIMIT_S
    assert engine.num_used == 8
    brake.is_on = False
    assert engine.tokens(3) == house.reference(prompt_of(120, 2))
    engine.submit(4, prompt_of(100, 3))
    assert engine.tokens(4) == house.reference(prompt_of(100, 3))
