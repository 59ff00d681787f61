"""A grammar that takes long to compile holds up its own sequence and nobody else's."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator

import jsonschema
import msgspec
import pytest
from llguidance import LLTokenizer

from backend.config import BackendConfig, CacheConfig, ModelSource, SchedulerConfig
from backend.engine.engine import Engine
from backend.engine.frames import FrameBuffer, encode_frame
from backend.engine.grammars import GrammarPool
from backend.engine.messages import AbortSequences, FromEngine, StepOutputs, TokenOutput
from backend.engine.worker import Channel, EngineLoop, ParentGoneError
from tests.support.fake_engine import FakeInfo
from tests.support.grammar_walks import tiny_grammar_tokenizer
from tests.unit.backend.engine.test_grammars import (
    EOS,
    SCHEMA,
    VOCAB_SIZE,
    NoisyRunner,
    request_of,
    text_of,
)

COMPILE_S = 0.7


class House:
    """An engine loop in a thread; its grammars take ``COMPILE_S``."""

    def __init__(self) -> None:
        def build() -> LLTokenizer:
            time.sleep(COMPILE_S)
            return tiny_grammar_tokenizer()

        tiny_grammar_tokenizer()  # made once for all tests, whatever that takes
        self._pool = GrammarPool(build, max_rows=8, max_cached=4)
        config = BackendConfig(
            replica_id="r0",
            model=ModelSource(path="fake", served_as="fake", max_model_len=4096),
            cache=CacheConfig(num_blocks=4096, block_size=4),
            scheduler=SchedulerConfig(max_tokens_per_step=64, max_running=8, max_waiting=8),
        )
        runner = NoisyRunner(info=FakeInfo(vocab_size=VOCAB_SIZE, eos_token_ids=EOS[:1]))
        seeds = itertools.count(1).__next__
        engine = Engine(runner, config, clock_s=time.monotonic, draw_seed=seeds, grammars=self._pool)
        self._sock, theirs = socket.socketpair()
        self._sock.settimeout(20)
        self._frames = FrameBuffer()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._thread = threading.Thread(target=self._serve, args=(engine, theirs))
        self._thread.start()

    def _serve(self, engine: Engine, sock: socket.socket) -> None:
        with sock:
            try:
                EngineLoop(engine, Channel(sock)).run()
            except ParentGoneError:
                return

    def close(self) -> None:
        self._sock.close()
        self._thread.join(20)
        self._pool.close()

    def send(self, message: object) -> None:
        self._sock.sendall(encode_frame(message))

    def outputs(self) -> Iterator[TokenOutput]:
        while True:
            for payload in self._frames.feed(self._sock.recv(65536)):
                message = self._decoder.decode(payload)
                assert isinstance(message, StepOutputs)
                yield from message.outputs


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.close()


def test_others_go_on_while_a_grammar_is_compiled(house: House) -> None:
    started_at = time.monotonic()
    house.send(request_of(1, grammar="", max_tokens=4000, ignore_eos=True, stop_token_ids=()))
    house.send(request_of(2))
    tokens: list[int] = []
    longest_s, last_at, first_at = 0.0, started_at, 0.0
    for output in house.outputs():
        now = time.monotonic()
        if output.sequence_id == 1:
            longest_s, last_at = max(longest_s, now - last_at), now
        else:
            first_at = first_at or now
            tokens += output.token_ids
            if output.finish_reason is not None:
                output.token_ids[:] = tokens
                break
    assert first_at - started_at >= COMPILE_S * 0.9, "the grammar did take its time"
    assert longest_s < COMPILE_S / 2
    if output.finish_reason == "stop":
        jsonschema.validate(json.loads(text_of(output)), SCHEMA)


def test_one_that_is_aborted_meanwhile_ends_at_once_and_never_begins(house: House) -> None:
    house.send(request_of(2))
    time.sleep(0.05)
    started_at = time.monotonic()
    house.send(AbortSequences([2]))
    output = next(house.outputs())
    assert time.monotonic() - started_at < COMPILE_S / 2
    assert (output.sequence_id, output.finish_reason, output.token_ids) == (2, "abort", [])
    house.send(request_of(3, grammar="", max_tokens=3))
    time.sleep(COMPILE_S)
    seen = set()
    for output in house.outputs():
        seen.add(output.sequence_id)
        if output.sequence_id == 3 and output.finish_reason is not None:
            break
    assert seen == {3}


def test_a_lone_sequence_begins_when_its_grammar_is_there(house: House) -> None:
    house.send(request_of(2))
    started_at = time.monotonic()
    first = next(house.outputs())
    assert first.token_ids
    assert COMPILE_S * 0.8 < time.monotonic() - started_at < COMPILE_S + 3
