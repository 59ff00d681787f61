from __future__ import annotations

import random

import msgspec
import pytest

from backend.engine import frames
from backend.engine.frames import FrameBuffer, FrameError, encode_frame
from backend.engine.messages import (
    AbortSequences,
    EngineStats,
    SamplingParams,
    SequenceRequest,
    StepOutputs,
    ToEngine,
    TokenLogprobs,
    TokenOutput,
)


def test_frames_survive_any_cut() -> None:
    messages = [AbortSequences(list(range(count))) for count in (0, 1, 200, 3)]
    stream = b"".join(encode_frame(message) for message in messages)
    rng = random.Random(1)
    for _ in range(100):
        cuts = sorted(rng.randrange(len(stream) + 1) for _ in range(rng.randrange(8)))
        buffer = FrameBuffer()
        payloads = []
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            payloads += buffer.feed(stream[start:end])
        assert [msgspec.msgpack.decode(payload, type=ToEngine) for payload in payloads] == messages


def test_a_length_beyond_the_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FrameError):
        FrameBuffer().feed(b"\xff\xff\xff\xff")
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 10)
    with pytest.raises(FrameError):
        encode_frame(list(range(20)))


def test_messages_keep_everything_on_the_way() -> None:
    request = SequenceRequest(
        sequence_id=7,
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(max_tokens=3, seed=2**62, logit_bias={5: -1.5}, stop_token_ids=(9,)),
        cache_salt=b"\x00\xff",
        block_extras={0: b"digest"},
        reject_if_busy=True,
    )
    (payload,) = FrameBuffer().feed(encode_frame(request))
    assert msgspec.msgpack.decode(payload, type=ToEngine) == request
    outputs = StepOutputs(
        [TokenOutput(sequence_id=7, token_ids=[4], logprobs=[TokenLogprobs(4, -0.5, [(4, -0.5)])])],
        EngineStats(num_running=1, busy_s=0.25),
    )
    (payload,) = FrameBuffer().feed(encode_frame(outputs))
    assert msgspec.msgpack.decode(payload, type=StepOutputs) == outputs
