"""The first rank: starts the others, tells them each step, and ends with the first of them that is lost."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from backend.config import BackendConfig
from backend.engine.frames import encode_frame
from backend.engine.kv_blocks import KvBlocks
from backend.engine.runner import ModelInfo, ModelRunner
from backend.engine.step import ShouldStop, StepPlan
from backend.engine.step_runner import StepRunner
from backend.model.errors import ModelLoadError
from backend.model.loader import Progress
from backend.parallel.crew_runner import join_crew
from backend.parallel.group import RankGroup, open_meeting
from backend.parallel.layers import ExpertLoads
from backend.parallel.messages import AllocateKv, JoinRanks, RunStep, ToRank
from backend.parallel.ranks import RankLostError, join_and_load

FOLLOWER_MODULE = "backend.parallel.follower"
MAX_RANKS = 64

_logger = logging.getLogger("backend.parallel")


class Followers:
    """The processes of the other ranks. They end when their standard input does, as this process's end does
    to it."""

    def __init__(self, config: BackendConfig, port: int) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, config.parallel.world):
            command = [sys.executable, "-m", FOLLOWER_MODULE]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            self._processes.append(process)
            self._send(process, JoinRanks(config, rank, port))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def tell(self, message: ToRank) -> None:
        """Send a message to every one.

        Raises:
            RankLostError: when one is gone.
        """
        for process in self._processes:
            self._send(process, message)

    def watch(self, on_lost: Callable[[int, int], None]) -> None:
        """From now on call ``on_lost(rank, exit_code)``, in a thread, when one has ended."""
        for rank, process in enumerate(self._processes, start=1):
            thread = threading.Thread(
                target=self._wait, args=(rank, process, on_lost), name=f"rank-{rank}", daemon=True
            )
            thread.start()

    def ended(self) -> str:
        """Which of them have ended, in words; empty when none has."""
        codes = [(rank, process.poll()) for rank, process in enumerate(self._processes, start=1)]
        return ", ".join(
            f"rank {rank} ended with exit code {code}" for rank, code in codes if code is not None
        )

    def close(self) -> None:
        """Let them end, and wait for it."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _send(self, process: subprocess.Popen[bytes], message: ToRank) -> None:
        assert process.stdin is not None  # it was made with a pipe
        try:
            process.stdin.write(encode_frame(message))
            process.stdin.flush()
        except OSError as error:
            raise RankLostError("a rank does not take its messages") from error

    @staticmethod
    def _wait(rank: int, process: subprocess.Popen[bytes], on_lost: Callable[[int, int], None]) -> None:
        on_lost(rank, process.wait())


class ParallelRunner:
    """A :class:`backend.engine.step_runner.StepRunner` over ranks, of which this process is the first.

    A step is not ended early: the ranks could not agree on where.
    """

    def __init__(
        self, runner: ModelRunner, followers: Followers, group: RankGroup, loads: ExpertLoads
    ) -> None:
        self._runner = runner
        self._followers = followers
        self._group = group
        self._loads = loads
        info = runner.info
        # On a CPU the ranks share the machine's memory; each has a cache.
        share = group.place.world if info.device == "cpu" else 1
        self.info: ModelInfo = replace(
            info,
            kv_memory_bytes=info.kv_memory_bytes // share,
            memory_bytes=info.memory_bytes // share,
        )

    @property
    def expert_loads(self) -> list[int]:
        """Choices of experts that each rank of the first expert group has computed."""
        return list(self._loads.totals)

    @property
    def kv_blocks(self) -> KvBlocks | None:
        """None: each rank has its own part of every block."""
        return None

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """As :meth:`backend.engine.runner.ModelRunner.allocate_kv`, on every rank."""
        self._followers.tell(AllocateKv(num_blocks, block_size))
        self._runner.allocate_kv(num_blocks, block_size)

    def execute(self, plan: StepPlan, should_stop: ShouldStop | None = None) -> Tensor:
        """Compute one step on every rank; the logits are whole here.

        Raises:
            RankLostError: when any rank fails.
        """
        self._followers.tell(RunStep(plan))
        try:
            return self._runner.execute(plan)
        except Exception as error:
            raise RankLostError(f"a step of {len(plan.chunks)} sequences failed") from error

    def close(self) -> None:
        """Leave the group, after the other ranks have ended."""
        self._group.close()


def load_runner(config: BackendConfig, progress: Progress = lambda share, doing: None) -> StepRunner:
    """Load the model into this process, or into as many ranks as are configured.

    Once loaded, this process ends as soon as one of the others has: what they hold is part of the model.

    Raises:
        ModelLoadError: naming what is wrong.
    """
    parallel = config.parallel
    if parallel.data != 1:
        return join_crew(config, progress)
    if parallel.tensor < 1 or parallel.expert < 1 or parallel.world > MAX_RANKS:
        raise ModelLoadError(
            f"parallel: {parallel.tensor} times {parallel.expert} ranks must be 1 to {MAX_RANKS}"
        )
    if parallel.world == 1:
        return ModelRunner.load(config, progress)
    return start_ranks(config, end_with, progress)[0]


def start_ranks(
    config: BackendConfig,
    on_lost: Callable[[int, int], None],
    progress: Progress = lambda share, doing: None,
) -> tuple[ParallelRunner, Followers]:
    """Start the other ranks and load every part of the model.

    Raises:
        ModelLoadError: naming what is wrong.
    """
    store = open_meeting(config.start_timeout_s)
    followers = Followers(config, store.port)
    try:
        runner, group, shard = join_and_load(config, 0, store, progress)
    except RuntimeError as error:
        ended = followers.ended()
        followers.close()
        raise ModelLoadError(f"parallel: {ended or error}; its log lines say why") from error
    except BaseException:
        followers.close()
        raise
    followers.watch(on_lost)
    return ParallelRunner(runner, followers, group, shard.loads), followers


def end_with(rank: int, exit_code: int) -> None:
    """End this process at once, whatever it waits for: its model has lost a part."""
    _logger.critical("rank %d ended with exit code %d; the replica ends with it", rank, exit_code)
    os._exit(1)
