"""The engine process: ``python -m backend.engine.worker FD``, started by :mod:`backend.engine.client`.

It reads its configuration from the socket it inherited as file descriptor FD, loads the model, says that it
is ready, and then runs steps as long as there is work; without work it sleeps on the socket. It lives as long
as the other end of the socket does: signals meant for the terminal or the process group are left to the
parent.

Exit codes: 0 when the parent closed the socket, 1 when the engine failed or could not start.
"""

from __future__ import annotations

import gc
import logging
import secrets
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
from llguidance import LLTokenizer

from backend.config import BackendConfig
from backend.engine.engine import Engine
from backend.engine.frames import FrameBuffer, encode_frame
from backend.engine.grammars import Compilation, GrammarPool
from backend.engine.messages import (
    AbortSequences,
    Configure,
    FromEngine,
    SequenceRequest,
    StartFailed,
    StartProgress,
    StepOutputs,
    ToEngine,
)
from backend.engine.step_runner import StepRunner
from backend.engine.transfers import take_message
from backend.telemetry import configure_logging
from backend.text.grammar_tokenizer import build_grammar_tokenizer
from backend.text.model_text import load_model_text
from backend.transfer.exchange import create_exchange

IDLE_CHECK_AFTER_S = 1.0
"""Without work for this long, the engine checks its books once."""

GRAMMAR_POLL_S = 0.005
"""How often an engine without other work looks whether a grammar is compiled."""

PROMOTION_POLL_S = 0.001
"""How often an engine looks whether blocks that a sequence waits for have come."""

WRITE_BACK_AFTER_S = 0.02
"""Without work for this long, the engine saves blocks on the disk tier, some at a time."""

PROGRESS_INTERVAL_S = 0.5
"""Progress of loading is sent at most so often."""

_READ_BYTES = 1 << 18
_SHARE_OF_LOADING = 0.9
"""Of the whole start, for people; the rest is the KV cache."""
_logger = logging.getLogger("backend.engine")

Report = Callable[[float, str], None]
"""Takes the share of the loading that is done (0 to 1), and what is being done."""
LoadRunner = Callable[[BackendConfig, Report], StepRunner]
LoadGrammars = Callable[[BackendConfig, StepRunner], GrammarPool]


@runtime_checkable
class Peers(Protocol):
    """Other engines that this one steps together with (:class:`backend.parallel.crew_runner.CrewRunner`)."""

    @property
    def descriptors(self) -> tuple[int, ...]: ...
    @property
    def is_stepping(self) -> bool: ...
    @property
    def num_steps(self) -> int: ...
    def look_up(self) -> None: ...
    def follow(self) -> None: ...


class ParentGoneError(Exception):
    """The process at the other end of the socket is gone or has closed it: time to exit."""


class Channel:
    """The engine's end of the socket. Sending waits for a parent that is slow to read; that is the
    backpressure."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = FrameBuffer()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._sleep = select.poll()
        self._sleep.register(sock, select.POLLIN)

    def wake_by(self, descriptors: ListOf[int]) -> None:
        """Let :meth:`sleep` also end when one of these can be read."""
        for descriptor in descriptors:
            self._sleep.register(descriptor, select.POLLIN)

    def sleep(self, timeout_s: float | None) -> bool:
        """Sleep until there is a message or something else to wake for, at most ``timeout_s``; whether so."""
        return bool(self._sleep.poll(None if timeout_s is None else timeout_s * 1000))

    def wait(self, timeout_s: float | None) -> bool:
        """Sleep until something can be read, at most ``timeout_s``; whether it can."""
        return bool(self._poll.poll(None if timeout_s is None else timeout_s * 1000))

    def receive(self) -> list[ToEngine]:
        """What has arrived; does not wait.

        Raises:
            ParentGoneError: at the end of the stream.
        """
        messages: list[ToEngine] = []
        while self.wait(0):
            try:
                data = self._sock.recv(_READ_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                raise ParentGoneError
            messages.extend(self._decoder.decode(payload) for payload in self._frames.feed(data))
        return messages

    def send(self, message: FromEngine) -> None:
        """Write one message.

        Raises:
            ParentGoneError: when nobody is there to read it.
        """
        try:
            self._sock.sendall(encode_frame(message))
        except ConnectionError as error:
            raise ParentGoneError from error


class EngineLoop:
    """Messages in, steps, outputs out, until the parent goes."""

    def __init__(self, engine: Engine, channel: Channel, peers: Peers | None = None) -> None:
        self._engine = engine
        self._channel = channel
        self._peers = peers
        if peers is not None:
            channel.wake_by(peers.descriptors)
        # Sequences whose grammars are being compiled; the HTTP side bounds how many it asks for.
        self._unready: dict[int, tuple[SequenceRequest, Compilation]] = {}

    def run(self) -> None:
        """Serve for ever.

        Raises:
            ParentGoneError: when the parent closes the socket.
        """
        engine, channel = self._engine, self._channel
        while True:
            if not engine.has_work and not (engine.transfers and engine.transfers.has_work):
                self._rest()
            self._look_up()
            self._admit_ready()
            num_steps = 0 if self._peers is None else self._peers.num_steps
            if engine.has_work:
                engine.step(self._look_up)
                channel.send(StepOutputs(engine.take_outputs(), engine.stats()))
                self._mind_tiers()
            if self._peers is not None and self._peers.is_stepping and self._peers.num_steps == num_steps:
                self._peers.follow()
            self._move_blocks()

    def _mind_tiers(self) -> None:
        """Between two steps: save blocks, and do not spin while all there is to do is to wait for some."""
        tiering = self._engine.tiering
        if tiering is not None:
            tiering.write_back(is_idle=False)
            if tiering.is_promoting:
                self._channel.sleep(PROMOTION_POLL_S)

    def _move_blocks(self) -> None:
        """Between two steps: copy some blocks of those on their way, and tell of it."""
        report = None if self._engine.transfers is None else self._engine.transfers.advance()
        if report is not None:
            self._channel.send(report)
            self._channel.send(StepOutputs([], self._engine.stats()))

    def _time_left_s(self) -> float | None:
        """Until a lease runs out; None when there is none."""
        transfers = self._engine.transfers
        deadline_s = None if transfers is None else transfers.next_deadline_s
        return None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)

    def _look_up(self) -> None:
        """Take in what has arrived, and tell at once what came of it."""
        messages = self._channel.receive()
        for message in messages:
            self._take(message)
        if messages:
            self._channel.send(StepOutputs(self._engine.take_outputs(), self._engine.stats()))

    def _rest(self) -> None:
        """Sleep, unless others go on; they may begin meanwhile."""
        if self._peers is None:
            self._sleep()
        elif not self._peers.is_stepping:
            self._sleep()
            self._peers.look_up()

    def _sleep(self) -> None:
        """Wait for a message. When none comes soon, use the quiet moment to check the books."""
        if self._unready:
            self._channel.sleep(GRAMMAR_POLL_S)
            return
        tiering = self._engine.tiering
        while tiering is not None and not self._channel.sleep(WRITE_BACK_AFTER_S):
            if not tiering.write_back(is_idle=True):
                break
        if not self._channel.sleep(IDLE_CHECK_AFTER_S):
            self._engine.check_invariants()
            self._channel.sleep(self._time_left_s())

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, SequenceRequest):
            self._admit(message)
        elif isinstance(message, AbortSequences):
            for sequence_id in message.sequence_ids:
                if unready := self._unready.pop(sequence_id, None):
                    self._engine.submit(unready[0])  # so that its end is told like any other's
                self._engine.abort(sequence_id)
        elif self._engine.transfers is not None and not isinstance(message, Configure):
            take_message(self._engine.transfers, message)

    def _admit(self, request: SequenceRequest) -> None:
        """Submit a sequence, later if its grammar has to be compiled first.

        That takes up to seconds, in which a step that waits for it would hold up everybody.
        """
        compiled = self._engine.prepare(request)
        if compiled is None or compiled.done():
            self._engine.submit(request)
        else:
            self._unready[request.sequence_id] = (request, compiled)

    def _admit_ready(self) -> None:
        for sequence_id, (request, compiled) in list(self._unready.items()):
            if compiled.done():
                del self._unready[sequence_id]
                self._engine.submit(request)


def serve(sock: socket.socket, load_runner: LoadRunner, load_grammars: LoadGrammars | None = None) -> int:
    """Be the engine process at this end of ``sock``; returns the exit code."""
    channel = Channel(sock)
    try:
        started = _start(channel, load_runner, load_grammars)
        if started is None:
            return 1
        engine, runner = started
        try:
            EngineLoop(engine, channel, runner if isinstance(runner, Peers) else None).run()
        finally:
            if engine.tiering is not None:
                engine.tiering.close()
    except ParentGoneError:
        return 0
    except Exception as error:  # noqa: BLE001  the top guard of this process
        _logger.critical("the engine loop failed: %s", describe_failure(error))
        return 1
    return 0


def _start(
    channel: Channel, load_runner: LoadRunner, load_grammars: LoadGrammars | None
) -> tuple[Engine, StepRunner] | None:
    config = _receive_config(channel)
    try:
        channel.send(StartProgress(0.0, "loading the model"))
        runner = load_runner(config, LoadingReport(channel, time.monotonic))
        channel.send(StartProgress(_SHARE_OF_LOADING, "allocating the KV cache"))
        engine = Engine(
            runner,
            config,
            clock_s=time.monotonic,
            draw_seed=lambda: secrets.randbits(63),
            grammars=None if load_grammars is None else load_grammars(config, runner),
        )
        if config.exchanges_blocks:
            buffer_bytes = config.transfer.buffer_mib * 2**20
            engine.connect(lambda layout: create_exchange(layout, buffer_bytes), config.transfer)
    except ParentGoneError:
        raise
    except Exception as error:  # whatever it is, the parent must be able to say it
        _logger.exception("the engine could not start")
        channel.send(StartFailed(_describe_start_failure(error)))
        return None
    # What is loaded now stays: keep the collector from walking it while sequences are served.
    gc.collect()
    gc.freeze()
    channel.send(engine.info)
    return engine, runner


class LoadingReport:
    """Passes on how far loading is, now and then: a model of many small parts would flood the socket."""

    def __init__(self, channel: Channel, clock_s: Callable[[], float]) -> None:
        self._channel = channel
        self._clock_s = clock_s
        self._sent_at_s = clock_s()

    def __call__(self, share: float, doing: str) -> None:
        now_s = self._clock_s()
        if now_s - self._sent_at_s >= PROGRESS_INTERVAL_S:
            self._sent_at_s = now_s
            self._channel.send(StartProgress(share * _SHARE_OF_LOADING, doing))


def _receive_config(channel: Channel) -> BackendConfig:
    while True:
        channel.wait(None)
        for message in channel.receive():
            if isinstance(message, Configure):
                return message.config


def _describe_start_failure(error: Exception) -> str:
    """Errors about what was asked for speak for themselves; others are named too."""
    if isinstance(error, ValueError | OSError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def describe_failure(error: Exception) -> str:
    """Where and what, without the message: that may hold a request's content."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return f"{type(error).__name__} at " + " < ".join(reversed(places))


def load_grammars(config: BackendConfig, runner: StepRunner) -> GrammarPool:
    """The grammars of the model that was loaded; its vocabulary is read in their thread."""
    info = runner.info

    def build() -> LLTokenizer:
        text = load_model_text(Path(config.model.path), cache_chars=0, vocab_size=info.vocab_size)
        return build_grammar_tokenizer(text, info.eos_token_ids)

    return GrammarPool(build, max_rows=config.scheduler.max_running, max_cached=config.grammar.max_cached)


def main(arguments: ListOf[str], load_runner: LoadRunner) -> int:
    """The process: leave signals to the parent, log to standard error, serve."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=int(arguments[0]))
    sock.set_inheritable(False)

    def load(config: BackendConfig, report: Report) -> StepRunner:
        configure_logging(config.replica_id, config.telemetry.log_level)
        return load_runner(config, report)

    with sock:
        return serve(sock, load, load_grammars)


if __name__ == "__main__":
    from backend.parallel.leader import load_runner

    sys.exit(main(sys.argv[1:], load_runner))
