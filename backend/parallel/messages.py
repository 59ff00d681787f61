"""What the first rank tells the others, as frames (:mod:`backend.engine.frames`) on their standard input."""

from __future__ import annotations

import msgspec

from backend.config import BackendConfig
from backend.engine.step import StepPlan


class JoinRanks(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """The first message: who the rank is, and the port where all meet."""

    config: BackendConfig
    rank: int
    port: int


class AllocateKv(msgspec.Struct, frozen=True, array_like=True, tag="allocate"):
    num_blocks: int
    block_size: int


class RunStep(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    plan: StepPlan


ToRank = JoinRanks | AllocateKv | RunStep
