"""The runner of one member of a crew (:mod:`backend.parallel.crew`)."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from backend.config import BackendConfig
from backend.engine.kv_blocks import KvBlocks
from backend.engine.runner import ModelInfo, ModelRunner
from backend.engine.step import ShouldStop, StepPlan
from backend.model.errors import ModelLoadError
from backend.model.loader import Progress
from backend.parallel.crew import Crew, connect_crew
from backend.parallel.group import RankGroup, RankPlace, meet_at
from backend.parallel.layers import ExpertLoads
from backend.parallel.rank_shard import RankShard
from backend.parallel.ranks import RankLostError, device_of

MAX_MEMBERS = 1024
_SHARE_OF_WAITING = 0.25
"""Of the time for the whole start, so that who waits in vain can still say for whom."""
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class CrewRunner:
    """A :class:`backend.engine.engine.StepRunner` that steps together with the other members'.

    A step is not ended early: the members could not agree on where. Any failure in one is the end of this
    member, and so of all.
    """

    def __init__(self, runner: ModelRunner, crew: Crew, group: RankGroup, loads: ExpertLoads) -> None:
        self._runner = runner
        self._crew = crew
        self._group = group
        self._loads = loads
        self.info: ModelInfo = runner.info
        self.num_steps = 0

    @property
    def expert_loads(self) -> list[int]:
        """Choices of experts that each member has computed for all."""
        return list(self._loads.totals)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Readable when others may have begun to step."""
        return self._crew.descriptors

    @property
    def is_stepping(self) -> bool:
        """Whether others wait for this member in every step."""
        return self._crew.is_stepping

    def look_up(self) -> None:
        """While at rest: see whether others have begun. Raises MemberLostError."""
        self._crew.look_up()

    @property
    def kv_blocks(self) -> KvBlocks | None:
        """Of this member's own cache."""
        return self._runner.kv_blocks

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """As :meth:`backend.engine.runner.ModelRunner.allocate_kv`."""
        self._runner.allocate_kv(num_blocks, block_size)

    def execute(self, plan: StepPlan, should_stop: ShouldStop | None = None) -> Tensor:
        """Compute one step with the others.

        Raises:
            RankLostError: when any member fails.
        """
        self.num_steps += 1
        try:
            self._crew.count_work(has_work=True)
            return self._runner.execute(plan)
        except Exception as error:
            raise RankLostError(f"a step of {len(plan.chunks)} sequences failed") from error

    def follow(self) -> None:
        """Take part in a step without work of one's own, or rest when nobody has any.

        Raises:
            RankLostError: when any member fails.
        """
        self.num_steps += 1
        try:
            if self._crew.count_work(has_work=False):
                self._runner.execute_nothing()
        except Exception as error:
            raise RankLostError("a step of others failed") from error

    def close(self) -> None:
        """Leave the crew, which ends with it."""
        self._crew.close()
        self._group.close()


def join_crew(config: BackendConfig, progress: Progress = lambda share, doing: None) -> CrewRunner:
    """Meet the other members and load this one's experts and a whole copy of the rest.

    Raises:
        ModelLoadError: naming what is wrong.
    """
    parallel = config.parallel
    host, port = _meeting_of(config)
    rank, world = parallel.data_rank, parallel.data
    device = device_of(config.device, rank, 1)
    wait_s = config.start_timeout_s * _SHARE_OF_WAITING
    backend = "nccl" if device.device.startswith("cuda") else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(torch.device(device.device))
    try:
        store = meet_at(host, port, is_first=rank == 0, timeout_s=wait_s)
        group = RankGroup(
            RankPlace(rank, 1, world), store, backend, parallel.exchange_timeout_s, is_local=host in _LOOPBACK
        )
        lines = connect_crew(store, rank, world, host, wait_s)
    except (RuntimeError, OSError) as error:
        raise ModelLoadError(
            f"parallel: member {rank} of {world} did not meet the others at {parallel.meeting}: {error}"
        ) from error
    shard = RankShard(group, takes_turns=True)
    runner = ModelRunner.load(msgspec.structs.replace(config, device=device), progress, shard)
    group.barrier()
    return CrewRunner(runner, Crew(group, lines), group, shard.loads)


def _meeting_of(config: BackendConfig) -> tuple[str, int]:
    parallel = config.parallel
    if parallel.world != 1:
        raise ModelLoadError("parallel.data: takes tensor 1 and expert 1; its members share the experts out")
    if not 1 < parallel.data <= MAX_MEMBERS or not 0 <= parallel.data_rank < parallel.data:
        raise ModelLoadError(f"parallel.data: there is no member {parallel.data_rank} of {parallel.data}")
    host, separator, port = parallel.meeting.rpartition(":")
    if not separator or not port.isdigit():
        raise ModelLoadError(f"parallel.meeting: expected HOST:PORT, got {parallel.meeting!r}")
    return host.strip("[]"), int(port)
