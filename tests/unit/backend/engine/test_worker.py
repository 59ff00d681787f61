from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

import msgspec
import pytest

from backend.config import BackendConfig, CacheConfig, ModelSource
from backend.engine import worker
from backend.engine.engine import Engine
from backend.engine.frames import FrameBuffer, encode_frame
from backend.engine.messages import (
    AbortSequences,
    Configure,
    EngineInfo,
    FromEngine,
    SamplingParams,
    SequenceRequest,
    StartFailed,
    StartProgress,
    StepOutputs,
    TokenOutput,
)
from backend.engine.sequence import InvariantError
from backend.engine.worker import LoadRunner
from tests.support.fake_engine import VOCAB_SIZE, FakeRunner
from tests.support.fake_model import alone


class Parent:
    """The other end of the socket, with the engine process's body in a thread of this one."""

    def __init__(self, load_runner: LoadRunner) -> None:
        self._sock, theirs = socket.socketpair()
        self._sock.settimeout(20)
        self._frames = FrameBuffer()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._received: list[FromEngine] = []
        self.exit_codes: list[int] = []
        self._thread = threading.Thread(target=self._serve, args=(theirs, load_runner))

    def _serve(self, theirs: socket.socket, load_runner: LoadRunner) -> None:
        with theirs:
            self.exit_codes.append(worker.serve(theirs, load_runner))

    def __enter__(self) -> Parent:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close()
        self._thread.join(20)

    def send(self, message: object) -> None:
        self._sock.sendall(encode_frame(message))

    def receive(self) -> FromEngine:
        while not self._received:
            data = self._sock.recv(65536)
            assert data, "the engine closed the socket"
            self._received += [self._decoder.decode(payload) for payload in self._frames.feed(data)]
        return self._received.pop(0)

    def start(self, path: str = "") -> EngineInfo:
        self.send(Configure(config_of(path)))
        assert isinstance(self.receive(), StartProgress)
        assert isinstance(self.receive(), StartProgress)
        info = self.receive()
        assert isinstance(info, EngineInfo)
        return info

    def outputs_of(self, sequence_id: int) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        while not outputs or outputs[-1].finish_reason is None:
            message = self.receive()
            assert isinstance(message, StepOutputs)
            outputs += [output for output in message.outputs if output.sequence_id == sequence_id]
        return outputs

    def has_ended(self) -> bool:
        self._thread.join(20)
        return not self._thread.is_alive()


def test_loading_is_reported_now_and_then_and_not_for_each_part() -> None:
    def load(config: BackendConfig, report: Callable[[float, str], None]) -> FakeRunner:
        for part in range(200):
            report(part / 200, f"loading layer {part}")
            time.sleep(0.001)
        return FakeRunner.load(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "PROGRESS_INTERVAL_S", 0.05)
        with Parent(load) as parent:
            parent.send(Configure(config_of()))
            stages = []
            while isinstance(message := parent.receive(), StartProgress):
                stages.append(message)
    fractions = [stage.fraction for stage in stages]
    assert fractions == sorted(fractions)
    layers = [stage for stage in stages if stage.stage.startswith("loading layer")]
    assert 2 <= len(layers) <= 20
    number = int(layers[0].stage.split()[-1])
    assert layers[0].fraction == pytest.approx(number / 200 * 0.9)


def config_of(path: str = "", num_blocks: int = 64) -> BackendConfig:
    return BackendConfig(
        replica_id="r0",
        model=ModelSource(path=path, served_as="fake", max_model_len=256),
        cache=CacheConfig(num_blocks=num_blocks),
    )


def request_of(sequence_id: int, max_tokens: int = 5) -> SequenceRequest:
    return SequenceRequest(
        sequence_id=sequence_id,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )


def test_it_serves_until_the_parent_closes_the_socket() -> None:
    with Parent(FakeRunner.load) as parent:
        assert parent.start().num_blocks == 64
        parent.send(request_of(1))
        outputs = parent.outputs_of(1)
        assert [output.token_ids[0] for output in outputs] == alone([1, 2, 3], 5, VOCAB_SIZE)
        parent.send(request_of(2, max_tokens=250))
        parent.send(AbortSequences([2, 77]))
        assert parent.outputs_of(2)[-1].finish_reason == "abort"
    assert parent.exit_codes == [0]


def test_a_parent_that_goes_while_sequences_run_ends_it() -> None:
    with Parent(FakeRunner.load) as parent:
        parent.start("slow")
        parent.send(request_of(1, max_tokens=250))
        parent.receive()
    assert parent.exit_codes == [0]


@pytest.mark.parametrize("say", [lambda parent: None, lambda parent: parent.send(AbortSequences([1]))])
def test_a_parent_that_goes_before_it_says_what_to_load_ends_it(say: Callable[[Parent], None]) -> None:
    with Parent(FakeRunner.load) as parent:
        say(parent)
    assert parent.exit_codes == [0]


def test_why_it_cannot_start_is_said_in_the_words_of_the_loader(caplog: pytest.LogCaptureFixture) -> None:
    with Parent(FakeRunner.load) as parent:
        parent.send(Configure(config_of("bad")))
        assert isinstance(parent.receive(), StartProgress)
        failure = parent.receive()
        assert failure == StartFailed("model.safetensors: tensor model.norm.weight is missing")
        assert parent.has_ended()
    assert parent.exit_codes == [1]
    assert "could not start" in caplog.text


def test_a_cache_that_is_too_small_is_said_with_the_fix() -> None:
    with Parent(FakeRunner.load) as parent:
        parent.send(Configure(config_of(num_blocks=3)))
        parent.receive()
        parent.receive()
        failure = parent.receive()
        assert isinstance(failure, StartFailed)
        assert "set it to 16 or more" in failure.message
    assert parent.exit_codes == [1]


def test_books_that_do_not_add_up_end_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(engine: Engine) -> None:
        raise InvariantError("a block was lost")

    monkeypatch.setattr(worker, "IDLE_CHECK_AFTER_S", 0.01)
    monkeypatch.setattr(Engine, "check_invariants", broken)
    with Parent(FakeRunner.load) as parent:
        parent.start()
        assert parent.has_ended()
    assert parent.exit_codes == [1]
    assert "InvariantError at" in caplog.text


def test_a_failure_is_logged_by_place_and_not_by_content() -> None:
    secret = "what the customer wrote"
    try:
        raise KeyError(secret)
    except KeyError as error:
        description = worker.describe_failure(error)
    assert description.startswith("KeyError at ")
    assert "test_worker.py" in description
    assert secret not in description
