"""An engine process without a model: ``EngineClient.start(config,
worker_module="tests.support.fake_engine")``.

The vocabulary is ``VOCAB_SIZE`` ids (bytes fit in), the end of a sequence is ``EOS_TOKEN_ID``. What it says
next depends on all tokens before (:mod:`tests.support.fake_model`). ``config.model.path`` may hold words that
change it: ``slow`` (a step takes 20 ms), ``bad`` (cannot be loaded), ``crash`` (dies in the first step) and
``poison`` (the model fails on prompts that begin with ``POISON_TOKEN_ID``).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.config import BackendConfig
from backend.engine.step import ScheduledChunk, ShouldStop, StepPlan
from backend.engine.worker import main
from backend.transfer.payload import KvLayout
from tests.support.fake_model import FakeModel

VOCAB_SIZE = 300
EOS_TOKEN_ID = 256
POISON_TOKEN_ID = 299


@dataclass(frozen=True, slots=True)
class FakeInfo:
    vocab_size: int = VOCAB_SIZE
    max_model_len: int = 4096
    eos_token_ids: tuple[int, ...] = (EOS_TOKEN_ID,)
    kv_bytes_per_token: int = 1024
    kv_memory_bytes: int = 1 << 30
    memory_bytes: int = 1 << 40
    has_vision: bool = False
    device: str = "cpu"


class FakeKvBlocks:
    """The fake model's memory as blocks of bytes: each slot has a state of 16 bytes and the one before."""

    def __init__(self, model: FakeModel, block_size: int) -> None:
        self._model = model
        self.layout = KvLayout("fake", "uint8", 1, block_size, (((block_size, 32),),))

    def export_blocks(self, blocks: Sequence[int], first_layer: int = 0, num_layers: int = 0) -> Tensor:
        rows = b"".join(self._model.read_block(block) for block in blocks)
        return torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(len(blocks), -1)

    def import_blocks(
        self, blocks: Sequence[int], rows: Tensor, first_layer: int = 0, num_layers: int = 0
    ) -> None:
        for block, row in zip(blocks, rows, strict=True):
            self._model.write_block(block, bytes(row.tolist()))


class FakeRunner:
    """A StepRunner whose logits peak at the fake model's next token."""

    def __init__(self, words: Sequence[str] = (), info: FakeInfo | None = None) -> None:
        self.words = frozenset(words)
        self.info = info or FakeInfo()
        self.num_steps = 0
        self.model: FakeModel | None = None
        self.kv_blocks: FakeKvBlocks | None = None

    @classmethod
    def load(cls, config: BackendConfig, report: object = None) -> FakeRunner:
        words = config.model.path.split()
        if "bad" in words:
            raise ValueError("model.safetensors: tensor model.norm.weight is missing")
        return cls(words)

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self.model = FakeModel(num_blocks, block_size, self.info.vocab_size)
        self.kv_blocks = FakeKvBlocks(self.model, block_size)

    def execute(self, plan: StepPlan, should_stop: ShouldStop | None = None) -> Tensor:
        assert self.model is not None
        self.num_steps += 1
        if "slow" in self.words:
            time.sleep(0.02)
        if "crash" in self.words:
            raise SystemError("the device is gone")
        if "poison" in self.words and any(is_poisoned(chunk) for chunk in plan.chunks):
            raise RuntimeError("the model cannot take this")
        states = self.model.run(plan)
        logits = torch.zeros(len(states), self.info.vocab_size)
        for row, state in enumerate(states):
            noise = torch.Generator().manual_seed(int.from_bytes(state[:7], "little"))
            logits[row] = torch.randn(self.info.vocab_size, generator=noise)
            logits[row, self.model.next_token(state)] = 8.0
        return logits


def is_poisoned(chunk: ScheduledChunk) -> bool:
    return chunk.start == 0 and chunk.token_ids[0] == POISON_TOKEN_ID


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], FakeRunner.load))
