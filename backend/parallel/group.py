"""The ranks that share one model: who they are, and how they talk during a step.

``tensor * expert`` ranks form a grid. Ranks with one place on the expert axis form a *tensor* group: each
holds a part of every matrix, and sums over the group make the parts whole. Ranks with one place on the tensor
axis form an *expert* group: each holds some of the experts. Everything else is the same on all ranks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank stands: ``rank = expert_rank * tensor + tensor_rank``."""

    rank: int
    tensor: int
    expert: int

    @property
    def world(self) -> int:
        return self.tensor * self.expert

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def expert_rank(self) -> int:
        return self.rank // self.tensor


@dataclass(frozen=True, slots=True)
class Span:
    """One part of ``total`` things: ``first`` to ``first + count - 1``."""

    first: int
    count: int
    total: int

    def times(self, width: int) -> Span:
        """The same part when each thing is ``width`` wide."""
        return Span(self.first * width, self.count * width, self.total * width)


def split(total: int, parts: int, index: int) -> Span:
    """Part ``index`` of as even a division as there is; the first ones get what is left over."""
    size, rest = divmod(total, parts)
    return Span(index * size + min(index, rest), size + (index < rest), total)


def open_meeting(timeout_s: float) -> TCPStore:
    """A place on this machine, at a free port, where ranks find each other; made by the first."""
    return TCPStore(
        _LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def join_meeting(port: int, timeout_s: float) -> TCPStore:
    return TCPStore(_LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def meet_at(host: str, port: int, *, is_first: bool, timeout_s: float) -> TCPStore:
    """A place that all know beforehand, held by the first; the others wait for it.

    Raises:
        RuntimeError: the port is taken, or the first did not come in time.
    """
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=is_first, wait_for_workers=False, timeout=timeout)


class RankGroup:
    """This rank among the others. All methods but :meth:`close` are collective: every rank calls them.

    Args:
        place: of this rank.
        store: where the ranks meet.
        backend: "gloo" or "nccl".
        timeout_s: how long one exchange may take before it fails.
        is_local: whether all ranks are on this machine.
    """

    def __init__(
        self, place: RankPlace, store: Store, backend: str, timeout_s: float, *, is_local: bool = True
    ) -> None:
        if is_local:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout
        )
        self.place = place
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        self._tensor: dist.ProcessGroup | None = None
        self._expert: dist.ProcessGroup | None = None
        # Every rank makes every group, in one order, and keeps its own two.
        for expert_rank in range(place.expert):
            ranks = [expert_rank * place.tensor + at for at in range(place.tensor)]
            group = dist.new_group(ranks, timeout=timeout, backend=backend)
            if expert_rank == place.expert_rank:
                self._tensor = group
        for tensor_rank in range(place.tensor):
            ranks = [at * place.tensor + tensor_rank for at in range(place.expert)]
            group = dist.new_group(ranks, timeout=timeout, backend=backend)
            if tensor_rank == place.tensor_rank:
                self._expert = group

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier()

    def sum_over_tensor(self, x: Tensor) -> Tensor:
        """The sum of the tensor group's parts, in place; the same bits on every rank."""
        if self.place.tensor > 1:
            dist.all_reduce(x, group=self._tensor)
        return x

    def sum_over_expert(self, x: Tensor) -> Tensor:
        """The sum over the expert group, in place."""
        if self.place.expert > 1:
            dist.all_reduce(x, group=self._expert)
        return x

    def count(self, is_one: bool) -> int:
        """How many ranks say so."""
        votes = torch.tensor([int(is_one)], device=self._device)
        dist.all_reduce(votes)
        return int(votes.item())

    def gather_over_tensor(self, x: Tensor) -> list[Tensor]:
        """Everyone's tensor of one shape, in order of tensor ranks."""
        parts = [torch.empty_like(x) for _ in range(self.place.tensor)]
        dist.all_gather(parts, x, group=self._tensor)
        return parts

    def gather_counts(self, counts: Tensor) -> Tensor:
        """``[experts, n]`` of everyone's ``[n]`` in the expert group."""
        parts = [torch.empty_like(counts) for _ in range(self.place.expert)]
        dist.all_gather(parts, counts, group=self._expert)
        return torch.stack(parts)

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """All to all in the expert group: the first ``sent[0]`` rows go to its first rank, and so on.

        Returns:
            ``received[0]`` rows of the first rank, then those of the next.
        """
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self._expert)
        return out

    def close(self) -> None:
        dist.destroy_process_group()
