"""The relay forwards what it may, holds back what ends a stream, and does not care how bytes were cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.sse import BrokenStreamError, FrameTooLongError, StreamRelay

USAGE = {"prompt_tokens": 42, "completion_tokens": 3, "total_tokens": 45}


def frame(value: object, separator: str = "\n\n") -> bytes:
    return f"data: {json.dumps(value, separators=(',', ':'))}{separator}".encode()


def chunk(text: object, **extra: object) -> dict[str, object]:
    return {"id": "c", "choices": [{"index": 0, "delta": {"content": text}}], **extra}


FINAL = {"id": "c", "choices": [], "usage": USAGE}
DONE = b"data: [DONE]\n\n"


class Client:
    """Collects what the relay writes; its clock counts calls."""

    def __init__(self, max_frame_bytes: int = 1 << 20) -> None:
        self.pieces: list[bytes] = []
        self.ticks = 0
        self.relay = StreamRelay(self.pieces.append, clock=self._tick, max_frame_bytes=max_frame_bytes)

    def _tick(self) -> float:
        self.ticks += 1
        return float(self.ticks)

    def feed(self, *pieces: bytes) -> Client:
        for piece in pieces:
            self.relay.feed(piece)
        return self

    @property
    def output(self) -> bytes:
        return b"".join(self.pieces)

    def facts(self) -> tuple[object, ...]:
        relay = self.relay
        return (
            self.output,
            relay.usage,
            relay.final_frame,
            relay.running_usage,
            relay.error,
            relay.is_done,
            relay.num_frames,
            relay.is_between_frames,
        )


def test_ordinary_frames_go_verbatim_in_one_write_each_piece() -> None:
    first, second = frame(chunk("a")), frame(chunk("b")) + frame(chunk("c"))
    client = Client().feed(first, second)
    assert client.pieces == [first, second]
    assert client.relay.num_frames == 3
    assert client.relay.first_frame_at == 1.0
    assert client.ticks == 1


def test_the_final_usage_and_done_are_held_back() -> None:
    client = Client().feed(frame(chunk("a")) + frame(FINAL) + DONE)
    assert client.output == frame(chunk("a"))
    assert client.relay.is_done
    assert json.loads(client.relay.usage or b"") == USAGE
    assert json.loads(client.relay.final_frame or b"") == FINAL
    assert client.relay.num_frames == 1


def test_a_null_usage_is_an_ordinary_chunk() -> None:
    frames = [frame(chunk("a", usage=None)), b'data: {"usage": null, "choices": [{}]}\n\n']
    client = Client().feed(*frames, b"".join(frames))
    assert client.pieces == [*frames, b"".join(frames)]
    assert client.relay.usage is None
    assert client.relay.running_usage is None


def test_a_usage_beside_choices_is_noted_and_forwarded() -> None:
    sent = frame(chunk("a", usage=USAGE))
    client = Client().feed(sent, frame(chunk("b")))
    assert client.output == sent + frame(chunk("b"))
    assert json.loads(client.relay.running_usage or b"") == USAGE
    assert client.relay.usage is None


@pytest.mark.parametrize(
    "text", ["[DONE]", "usage", "error", '"usage":{"prompt_tokens":1}', "data: [DONE]\n\n", "\r\n"]
)
def test_content_that_looks_like_an_end_is_forwarded(text: str) -> None:
    sent = frame(chunk(text))
    client = Client().feed(sent, frame(chunk("x")) + sent)
    assert client.output == sent + frame(chunk("x")) + sent
    assert not client.relay.is_done
    assert client.relay.usage is None
    assert client.relay.error is None
    assert client.relay.num_frames == 3


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b'data: {"error":{"message":"boom","code":"x"}}\n\n', b'{"message":"boom","code":"x"}'),
        (b'data: {"object":"error","message":"boom"}\n\n', b'{"object":"error","message":"boom"}'),
        (b'event: error\ndata: {"message":"boom"}\n\n', b'{"message":"boom"}'),
        (b'event: error\ndata: {"error":"boom"}\n\n', b'"boom"'),
        (b"event: error\ndata: boom\n\n", b"boom"),
    ],
)
def test_an_error_frame_is_held_back_and_ends_the_relay(sent: bytes, error: bytes) -> None:
    client = Client().feed(frame(chunk("a")), sent, frame(chunk("b")), DONE)
    assert client.output == frame(chunk("a"))
    assert client.relay.error == error
    assert not client.relay.is_done


def test_nothing_counts_after_done() -> None:
    client = Client().feed(DONE + frame(FINAL), frame(chunk("late")), b"no end")
    assert client.output == b""
    assert client.relay.usage is None
    assert client.relay.is_between_frames


def test_a_null_error_is_an_ordinary_chunk() -> None:
    sent = frame(chunk("a", error=None))
    assert Client().feed(sent).output == sent


def test_comments_pass_and_do_not_count() -> None:
    client = Client().feed(b": ping\n\n", b": [DONE]\n\n")
    assert client.output == b": ping\n\n: [DONE]\n\n"
    assert client.relay.num_frames == 0
    assert client.relay.first_frame_at is None
    assert not client.relay.is_done


def test_carriage_returns_in_separators_are_tolerated() -> None:
    sent = frame(chunk("a"), "\r\n\r\n")
    client = Client().feed(sent + frame(FINAL, "\r\n\r\n") + b"data: [DONE]\r\n\r\n")
    assert client.output == sent
    assert client.relay.is_done
    assert json.loads(client.relay.usage or b"") == USAGE


def test_data_over_several_lines_is_one_frame() -> None:
    client = Client().feed(b'data: {"choices":[],\ndata: "usage":{"a":1}}\n\n')
    assert client.output == b""
    assert client.relay.usage == b'{"a":1}'


def test_a_frame_without_an_end_is_bounded() -> None:
    client = Client(max_frame_bytes=100)
    client.feed(b"data: " + b"x" * 90)
    with pytest.raises(FrameTooLongError):
        client.feed(b"x" * 20)


def test_a_long_piece_of_short_frames_is_not_too_long() -> None:
    sent = frame(chunk("a")) * 50
    assert Client(max_frame_bytes=100).feed(sent[:-1], sent[-1:]).output == sent


def test_an_end_that_cannot_be_decoded_is_an_error_and_not_an_answer() -> None:
    with pytest.raises(BrokenStreamError):
        Client().feed(b'data: {"choices":[],"usage":{"prompt_tokens":1}\n\n')


def test_a_partial_frame_shows() -> None:
    client = Client().feed(frame(chunk("a"))[:-1])
    assert not client.relay.is_between_frames
    assert client.output == b""
    assert client.feed(b"\n").relay.is_between_frames


STREAM = (
    b": hello\n\n"
    + frame(chunk("a", usage=None))
    + frame(chunk("[DONE] usage"))
    + frame(chunk("usage"), "\r\n\r\n")
    + b'event: message\ndata: {"choices":[{}]}\n\n\n'
    + frame(chunk("b", usage=USAGE))
    + frame(FINAL)
    + DONE
)


def test_every_cut_in_two_gives_the_same() -> None:
    whole = Client().feed(STREAM).facts()
    for cut in range(1, len(STREAM)):
        assert Client().feed(STREAM[:cut], STREAM[cut:]).facts() == whole, cut


def test_byte_by_byte_gives_the_same() -> None:
    pieces = [STREAM[i : i + 1] for i in range(len(STREAM))]
    assert Client().feed(*pieces).facts() == Client().feed(STREAM).facts()


ANY_FRAME = st.one_of(
    st.builds(
        lambda text, sep: frame(chunk(text), sep), st.text(max_size=12), st.sampled_from(["\n\n", "\r\n\r\n"])
    ),
    st.builds(
        lambda text: frame(chunk(text, usage=None)), st.sampled_from(["usage", "[DONE]", "error", "é", ""])
    ),
    st.just(frame(chunk("x", usage=USAGE))),
    st.sampled_from([b": ping\n\n", b"\n\n", b"retry: 10\n\n", b"id: 1\ndata: {}\n\n", b"data:{}\n\n"]),
)
ENDING = st.sampled_from(
    [b"", frame(FINAL), frame(FINAL) + DONE, DONE, b'data: {"error":{"message":"x"}}\n\n', b"data: {"]
)


@settings(max_examples=150, deadline=None)
@given(
    frames=st.lists(ANY_FRAME, max_size=12), ending=ENDING, cuts=st.lists(st.integers(0, 2000), max_size=12)
)
def test_any_cut_in_many_gives_the_same(frames: list[bytes], ending: bytes, cuts: list[int]) -> None:
    stream = b"".join(frames) + ending
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    pieces = [stream[start:end] for start, end in pairwise(edges)]
    assert Client().feed(*pieces).facts() == Client().feed(stream).facts()
    assert Client().feed(stream).output == b"".join(frames)
