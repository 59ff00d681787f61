"""Keeps the gateway and its replicas running: starts them, watches them, restarts them, stops them in order.

Owner of state: the table of watched children, which only the supervisor's own tasks change. Time: the event
loop's clock. Invariant: after :meth:`Supervisor.run` returns or raises, no child is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

from backend.wire import Health
from embergate.child import Child, ChildSpec, describe_exit
from embergate.config import SupervisorConfig
from embergate.log_rotation import rotate, tail
from embergate.refusal import Refusal
from embergate.run_state import Phase, ProcessIdentity, ProcessState, RunState, StateFile, Status

_LOG_CHECK_INTERVAL_S = 1.0
_PROBE_TIMEOUT_S = 2.0
_STAGE_INTERVAL_S = 2.0
"""How often at most a child that loads is quoted."""


class Backoff:
    """Seconds to wait before each restart: doubled with each death, reset by a life of ``stable_after_s``."""

    def __init__(self, config: SupervisorConfig) -> None:
        self._config = config
        self._delay_s = config.backoff_initial_s

    def next_delay_s(self, lived_s: float) -> float:
        """The pause after a process that lived for ``lived_s`` seconds."""
        if lived_s >= self._config.stable_after_s:
            self._delay_s = self._config.backoff_initial_s
        delay = min(self._delay_s, self._config.backoff_max_s)
        self._delay_s = min(self._delay_s * 2, self._config.backoff_max_s)
        return delay


class Watched:
    """One child through all its lives."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.child: Child | None = None
        self.status: Status = "starting"
        self.num_restarts = 0
        self.was_ready = asyncio.Event()

    def describe(self) -> ProcessState:
        return ProcessState(
            name=self.spec.name,
            status=self.status,
            identity=self.child.identity if self.child else None,
            num_restarts=self.num_restarts,
            url=self.spec.url,
            log=str(self.spec.log),
        )


class Supervisor:
    """Runs the children of all ``stages``: started at once, stopped stage by stage in the order given.

    ``report`` gets one line for each thing that a person watching would want to know.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[ChildSpec]],
        config: SupervisorConfig,
        state_file: StateFile,
        identity: ProcessIdentity,
        report: Callable[[str], None],
    ) -> None:
        self._stages = [[Watched(spec) for spec in stage] for stage in stages]
        self._watched = [watched for stage in self._stages for watched in stage]
        self._config = config
        self._state_file = state_file
        self._identity = identity
        self._report = report
        self._phase: Phase = "starting"
        self._message = ""
        self._stopping = asyncio.Event()
        self._force = asyncio.Event()

    def stop(self) -> None:
        """Ask for an orderly stop; asked a second time, everything is killed at once."""
        if self._stopping.is_set():
            self._report("Killing what still runs.")
            self._force.set()
        else:
            self._report("Stopping: requests in flight are answered first; once more kills at once ...")
        self._stopping.set()

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Start everything, call ``on_ready`` once, and return after :meth:`stop` when all children are gone.

        Raises:
            Refusal: when a child keeps dying or is not ready in time during the start.
        """
        self._publish()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)) as session:
            tasks = [asyncio.create_task(self._keep(watched, session)) for watched in self._watched]
            tasks.append(asyncio.create_task(self._rotate_logs()))
            for task in tasks:
                task.add_done_callback(self._fail_with)
            try:
                await self._become_ready()
                if not self._stopping.is_set():
                    self._set_phase("ready")
                    on_ready()
                await self._stopping.wait()
            finally:
                self._stopping.set()
                self._set_phase("failed" if self._message else "stopping")
                await self._stop_in_order()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._publish()
        if self._message:
            raise Refusal(self._message)

    def _fail(self, message: str) -> None:
        """Give up: stop everything and let :meth:`run` raise. The first reason is kept."""
        if not self._stopping.is_set():
            self._message = message
        self._stopping.set()

    def _fail_with(self, task: asyncio.Task[None]) -> None:
        """A task of ours must not die unseen."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(f"the supervisor failed: {error!r}")

    async def _become_ready(self) -> None:
        """Wait until every child was ready once, or a stop was asked for."""
        ready = asyncio.create_task(self._wait_for_all())
        stopping = asyncio.create_task(self._stopping.wait())
        done, pending = await asyncio.wait(
            (ready, stopping), timeout=self._config.ready_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for waiter in pending:
            waiter.cancel()
        if not done:
            late = next(watched.spec for watched in self._watched if not watched.was_ready.is_set())
            self._fail(
                f"{late.name} was not ready after {self._config.ready_timeout_s:g} s: "
                f"see {late.log}, or raise supervisor.ready_timeout_s."
            )

    async def _wait_for_all(self) -> None:
        for watched in self._watched:
            await watched.was_ready.wait()

    async def _keep(self, watched: Watched, session: aiohttp.ClientSession) -> None:
        """Run one child again and again until a stop is asked for."""
        backoff, failures = Backoff(self._config), 0
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            born = loop.time()
            watched.child = await Child.spawn(watched.spec)
            if self._stopping.is_set():
                await watched.child.stop(self._force)
                break
            self._set_status(watched, "starting")
            probe = asyncio.create_task(self._probe(watched, session))
            code = await watched.child.wait()
            probe.cancel()
            watched.child = None
            if self._stopping.is_set():
                break
            failures += 1
            if self._phase == "starting" and failures >= self._config.max_start_failures:
                self._fail(_why_it_failed(watched.spec, code))
                break
            delay = backoff.next_delay_s(loop.time() - born)
            self._report(f"{watched.spec.name} {describe_exit(code)}; starting it again in {delay:g} s")
            self._set_status(watched, "backoff")
            await self._pause(delay)
            watched.num_restarts += 1
        watched.child = None
        self._set_status(watched, "stopped")

    async def _probe(self, watched: Watched, session: aiohttp.ClientSession) -> None:
        """Ask the child until it says that it is ready, and pass on how far it is."""
        loop = asyncio.get_running_loop()
        quoted, quote_at_s = "", loop.time() + _STAGE_INTERVAL_S
        while True:
            try:
                async with session.get(watched.spec.health_url) as response:
                    if response.status == 200:
                        break
                    stage = _stage_of(await response.read())
                    if stage and stage != quoted and loop.time() >= quote_at_s:
                        quoted, quote_at_s = stage, loop.time() + _STAGE_INTERVAL_S
                        self._report(f"{watched.spec.name}: {stage}")
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass
            await asyncio.sleep(self._config.probe_interval_s)
        self._set_status(watched, "ready")
        watched.was_ready.set()
        self._report(f"{watched.spec.name} is ready at {watched.spec.url}")

    async def _stop_in_order(self) -> None:
        for stage in self._stages:
            children = [watched.child for watched in stage if watched.child is not None]
            await asyncio.gather(*(child.stop(self._force) for child in children))

    async def _rotate_logs(self) -> None:
        config = self._config
        while not self._stopping.is_set():
            for watched in self._watched:
                if await asyncio.to_thread(
                    rotate, watched.spec.log, config.log_max_bytes, config.log_num_backups
                ):
                    self._report(f"the log of {watched.spec.name} was rotated")
            await self._pause(_LOG_CHECK_INTERVAL_S)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not past a stop."""
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return

    def _set_status(self, watched: Watched, status: Status) -> None:
        watched.status = status
        self._publish()

    def _set_phase(self, phase: Phase) -> None:
        self._phase = phase
        self._publish()

    def _publish(self) -> None:
        """Tell others. A disk too full for that must not stop what runs."""
        state = RunState(
            supervisor=self._identity,
            phase=self._phase,
            processes=[watched.describe() for watched in self._watched],
            message=self._message,
        )
        try:
            self._state_file.write(state)
        except OSError as error:
            self._report(f"the state of the processes cannot be written: {error.strerror}")


def _stage_of(body: bytes) -> str:
    """What a starting replica says that it is doing; empty for anything else."""
    try:
        health = msgspec.json.decode(body, type=Health)
    except msgspec.DecodeError:
        return ""
    return f"{health.stage} ({health.fraction:.0%})" if health.fraction > 0 else ""


def _why_it_failed(spec: ChildSpec, code: int) -> str:
    """The sentence for a child that does not come up, with the end of its log, where the reason stands."""
    last = [line for line in tail(spec.log, 20) if line.strip()]
    reason = f": {last[-1].strip()}" if last else ""
    return f"{spec.name} {describe_exit(code)} before it was ready{reason} (more in {spec.log})"
