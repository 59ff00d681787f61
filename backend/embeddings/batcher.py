"""Batches: inputs of many requests are computed together, in order of arrival, in one thread.

The event loop only hands over and takes back. A batch takes inputs from the head of the queue as long as all
of them, filled up to the longest, stay within ``max_batch_tokens``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from backend.embeddings.encoder import Vector
from backend.http.errors import refused
from backend.wire import Pooling

Embed = Callable[[Sequence[Sequence[int]], Sequence[Pooling]], list[Vector]]


class Job:
    """One request's inputs on their way. ``num_computed_tokens`` is what it cost until now."""

    __slots__ = ("done", "inputs", "is_started", "num_computed_tokens", "num_left", "pooling", "vectors")

    def __init__(self, inputs: Sequence[Sequence[int]], pooling: Pooling, done: asyncio.Future[None]) -> None:
        self.inputs = inputs
        self.pooling: Pooling = pooling
        self.done = done
        self.vectors: list[Vector | None] = [None] * len(inputs)
        self.num_left = len(inputs)
        self.num_computed_tokens = 0
        self.is_started = False

    def take_back(self, index: int, vector: Vector) -> None:
        self.vectors[index] = vector
        self.num_left -= 1
        if not self.num_left and not self.done.done():
            self.done.set_result(None)


_Place = tuple[Job, int]


class Batcher:
    """The queue and what empties it. Belongs to one event loop.

    ``embed`` runs in ``executor``, one batch at a time.
    """

    def __init__(
        self,
        embed: Embed,
        executor: Executor,
        *,
        max_batch_tokens: int,
        max_waiting_inputs: int,
        max_queue_wait_s: float,
    ) -> None:
        self._embed = embed
        self._executor = executor
        self._max_batch_tokens = max_batch_tokens
        self._max_waiting_inputs = max_waiting_inputs
        self._max_queue_wait_s = max_queue_wait_s
        self._queue: deque[_Place] = deque()
        self._pump: asyncio.Task[None] | None = None
        self.num_computing = 0

    @property
    def num_waiting(self) -> int:
        """Inputs in the queue."""
        return len(self._queue)

    async def run(self, job: Job, *, rejects_if_busy: bool) -> None:
        """Compute all vectors of ``job``. Cancelled, it drops what is not being computed yet.

        Raises:
            ReplicaError: 429 when the queue is full, when something is in it and the job would not wait, or
                when it waited too long.
        """
        if rejects_if_busy and (self._queue or self.num_computing):
            raise refused("busy", "the replica is busy")
        if len(self._queue) + len(job.inputs) > self._max_waiting_inputs:
            raise refused("queue_full", f"more than {self._max_waiting_inputs} inputs wait already")
        self._queue.extend((job, index) for index in range(len(job.inputs)))
        if self._pump is None:
            self._pump = asyncio.create_task(self._work())
        timer = asyncio.get_running_loop().call_later(self._max_queue_wait_s, _give_up, job)
        try:
            await job.done
        finally:
            timer.cancel()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while batch := self._next_batch():
                inputs = [job.inputs[index] for job, index in batch]
                poolings = [job.pooling for job, _ in batch]
                self.num_computing = len(batch)
                try:
                    vectors = await loop.run_in_executor(self._executor, self._embed, inputs, poolings)
                except Exception as error:  # noqa: BLE001 - whatever it is, the jobs must not wait for ever
                    _fail(batch, error)
                    continue
                for (job, index), vector in zip(batch, vectors, strict=True):
                    job.take_back(index, vector)
        finally:
            self.num_computing = 0
            self._pump = None

    def _next_batch(self) -> list[_Place]:
        batch: list[_Place] = []
        longest = 0
        while self._queue:
            job, index = self._queue[0]
            if not job.done.done():
                num_tokens = len(job.inputs[index])
                longest = max(longest, num_tokens)
                if batch and longest * (len(batch) + 1) > self._max_batch_tokens:
                    return batch
                job.is_started = True
                job.num_computed_tokens += num_tokens
                batch.append((job, index))
            self._queue.popleft()
        return batch


def _give_up(job: Job) -> None:
    if not job.is_started and not job.done.done():
        job.done.set_exception(refused("queue_timeout", "the replica was busy for too long"))


def _fail(batch: Sequence[_Place], error: Exception) -> None:
    for job, _ in batch:
        if not job.done.done():
            job.done.set_exception(error)
