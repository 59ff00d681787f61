from __future__ import annotations

import msgspec
import pytest

from backend.transfer.payload import (
    HEADER_BYTES,
    BadRecordError,
    CorruptRecordError,
    KvLayout,
    WrongBlockError,
    WrongLayoutError,
    read_record,
    record_of,
    write_record,
)

LAYOUT = KvLayout("m" * 64, "float32", 4, 16, (((2, 3), (2, 3)), ((2, 3), (2, 3))))
DIGEST, OTHER = b"d" * 32, b"o" * 32
CONTENT = bytes(range(96))


def record() -> bytearray:
    return bytearray(record_of(LAYOUT, DIGEST, memoryview(CONTENT)))


def test_a_record_gives_back_what_was_written() -> None:
    assert LAYOUT.block_bytes == len(CONTENT)
    assert len(record()) == LAYOUT.record_bytes == HEADER_BYTES + 96
    found = read_record(memoryview(record()), LAYOUT, DIGEST)
    assert (found.digest, found.first_layer, found.num_layers) == (DIGEST, 0, 2)
    assert bytes(found.content) == CONTENT


def test_a_record_of_some_layers_says_which() -> None:
    into = bytearray(LAYOUT.record_bytes)
    size = write_record(memoryview(into), LAYOUT, DIGEST, memoryview(CONTENT)[48:], 1, 1)
    found = read_record(memoryview(into), LAYOUT, DIGEST)
    assert size == HEADER_BYTES + 48
    assert (found.first_layer, found.num_layers, bytes(found.content)) == (1, 1, CONTENT[48:])


@pytest.mark.parametrize("at", [0, 8, 12, 20, 52, 90, HEADER_BYTES, HEADER_BYTES + 95])
def test_a_changed_bit_anywhere_is_noticed(at: int) -> None:
    data = record()
    data[at] ^= 1
    with pytest.raises(CorruptRecordError):
        read_record(memoryview(data), LAYOUT, DIGEST)


def test_a_record_that_is_cut_short_is_noticed() -> None:
    for length in (0, 5, HEADER_BYTES, HEADER_BYTES + 95):
        with pytest.raises(CorruptRecordError):
            read_record(memoryview(record())[:length], LAYOUT, DIGEST)


def test_another_block_is_refused() -> None:
    with pytest.raises(WrongBlockError):
        read_record(memoryview(record()), LAYOUT, OTHER)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n" * 64},
        {"dtype": "bfloat16"},
        {"block_size": 32},
        {"layers": (((3, 2), (2, 3)), ((2, 3), (2, 3)))},
        {"part": "1/2"},
    ],
)
def test_a_cache_of_another_kind_refuses(change: dict[str, object]) -> None:
    other = msgspec.structs.replace(LAYOUT, **change)
    assert other.name_of(DIGEST) != LAYOUT.name_of(DIGEST)
    with pytest.raises(WrongLayoutError):
        read_record(memoryview(record()), other, DIGEST)
    with pytest.raises(BadRecordError):
        read_record(memoryview(record_of(other, DIGEST, memoryview(CONTENT))), LAYOUT, DIGEST)


def test_contents_of_a_wrong_length_are_not_written() -> None:
    with pytest.raises(ValueError, match="are not layers 0"):
        record_of(LAYOUT, DIGEST, memoryview(CONTENT)[:-1])
    with pytest.raises(ValueError, match="does not fit"):
        write_record(memoryview(bytearray(100)), LAYOUT, DIGEST, memoryview(CONTENT))
