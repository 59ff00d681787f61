"""Chunked request bodies: strict framing, bounded, however they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.edge.chunked import BadChunkError, BodyTooLargeError, ChunkedDecoder


def encode(pieces: list[bytes], trailers: bytes = b"") -> bytes:
    chunks = [b"%x;note=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece]
    return b"".join(chunks) + b"0\r\n" + trailers + b"\r\n"


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    trailers=st.sampled_from([b"", b"x: y\r\n"]),
    rest=st.sampled_from([b"", b"POST / HTTP/1.1\r\n"]),
    cut=st.integers(1, 50),
)
def test_any_cut_gives_the_same_body_and_rest(
    pieces: list[bytes], trailers: bytes, rest: bytes, cut: int
) -> None:
    wire = encode(pieces, trailers)
    decoder = ChunkedDecoder(10_000)
    sent = [wire[i : i + cut] for i in range(0, len(wire), cut)]
    for piece in sent[:-1]:
        assert decoder.feed(piece) is None
    assert decoder.feed(sent[-1] + rest) == rest
    assert decoder.body == b"".join(pieces)
    assert decoder.num_bytes == len(decoder.body)


@pytest.mark.parametrize(
    "wire",
    [
        b"-1\r\n",
        b"+3\r\nabc\r\n",
        b"0x3\r\nabc\r\n",
        b" 3\r\nabc\r\n",
        b"3_0\r\n",
        b"\r\nabc",
        b"3\nabc\r\n",
        b"3\r\nabcd\r\n",
        b"3\r\nabc\n0\r\n\r\n",
        b"3\r\nabc\rx",
        b"fffffffffffffffff\r\n",
        b"3;" + b"x" * 2000,
        b"0\r\n" + b"x: y\r\n" * 3000,
    ],
)
def test_malformed_framing_is_refused(wire: bytes) -> None:
    with pytest.raises((BadChunkError, BodyTooLargeError)):
        assert ChunkedDecoder(100).feed(wire + b"\r\n" * 2) is None


def test_the_limit_holds_before_the_bytes_come() -> None:
    decoder = ChunkedDecoder(10)
    assert decoder.feed(b"8\r\n12345678\r\n") is None
    with pytest.raises(BodyTooLargeError):
        decoder.feed(b"3\r\n")
