"""A KV block outside of a KV cache: its content behind a header that says exactly what it is.

Domain: a *layout* is everything that two caches must share for one's bytes to mean the same in the other: the
model (a fingerprint of its files), the type of numbers, tokens per block, the shape of each layer's part. A
block's full name is its digest (chained from the account's salt over every token and image before it, see
:mod:`backend.engine.prefix_cache`) in a layout. A *record* is a header with that name, a checksum over header
and content, and the content: some or all layers of one block, in order.

Torch-free: contents are plain bytes. Time: O(bytes) for the checksum.
"""

from __future__ import annotations

import struct
from functools import cached_property
from hashlib import blake2b
from math import prod

import msgspec
from xxhash import xxh3_128

_MAGIC = b"embrkv1\0"
_HEADER = struct.Struct("<8sHHI32s32s")
_CHECKSUM_BYTES = 16
HEADER_BYTES = _HEADER.size + _CHECKSUM_BYTES
_LAYOUT_DOMAIN = b"embergate.kv.1.layout"
_NAME_DOMAIN = b"embergate.kv.1.name"


class BadRecordError(ValueError):
    """A record is not what was wanted, or not what was written. Its content must not be used."""


class WrongLayoutError(BadRecordError):
    """It comes from a cache of another model, type or shape."""


class WrongBlockError(BadRecordError):
    """It is another block, or other layers, than the one that was asked for."""


class CorruptRecordError(BadRecordError):
    """Its checksum or length is wrong."""


class KvLayout(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """What two caches must have in common.

    ``model`` is a fingerprint of the model's files, ``dtype`` and ``item_bytes`` say what a number is,
    ``layers`` has the shape of one block in each tensor of each layer. ``part`` is which part of the model
    this is, "1/1" for a whole one.
    """

    model: str
    dtype: str
    item_bytes: int
    block_size: int
    layers: tuple[tuple[tuple[int, ...], ...], ...]
    part: str = "1/1"

    @cached_property
    def digest(self) -> bytes:
        """32 bytes, equal exactly for equal layouts."""
        return blake2b(_LAYOUT_DOMAIN + msgspec.msgpack.encode(self), digest_size=32).digest()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of each layer's part of a block."""
        return tuple(sum(prod(shape) for shape in shapes) * self.item_bytes for shapes in self.layers)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block's content, all layers together."""
        return sum(self.layer_bytes)

    @property
    def record_bytes(self) -> int:
        """Bytes of a whole block's record."""
        return HEADER_BYTES + self.block_bytes

    def bytes_of(self, first_layer: int, num_layers: int) -> int:
        """Bytes of some of a block's layers."""
        return sum(self.layer_bytes[first_layer : first_layer + num_layers])

    def name_of(self, block_digest: bytes) -> str:
        """The full name of a block as 64 hexadecimal characters: for files and tables of tiers."""
        return blake2b(_NAME_DOMAIN + self.digest + block_digest, digest_size=32).hexdigest()


class Record(msgspec.Struct, frozen=True):
    """A record that was found to be whole: ``content`` is a view of the bytes it was read from."""

    digest: bytes
    first_layer: int
    num_layers: int
    content: memoryview


def write_record(
    into: memoryview,
    layout: KvLayout,
    digest: bytes,
    content: memoryview,
    first_layer: int = 0,
    num_layers: int | None = None,
) -> int:
    """Write a record of (some layers of) the block ``digest``; returns how many bytes it takes.

    Raises:
        ValueError: when ``content`` is not as long as these layers are, or ``into`` is too short.
    """
    count = layout.num_layers if num_layers is None else num_layers
    if len(content) != layout.bytes_of(first_layer, count):
        raise ValueError(f"{len(content)} bytes are not layers {first_layer}..{first_layer + count - 1}")
    end = HEADER_BYTES + len(content)
    if len(into) < end:
        raise ValueError(f"a record of {end} bytes does not fit into {len(into)}")
    header = _HEADER.pack(_MAGIC, first_layer, count, len(content), layout.digest, digest)
    into[: _HEADER.size] = header
    into[_HEADER.size : HEADER_BYTES] = _checksum(header, content)
    into[HEADER_BYTES:end] = content
    return end


def record_of(layout: KvLayout, digest: bytes, content: memoryview) -> bytes:
    """A whole block's record, as bytes of its own."""
    data = bytearray(layout.record_bytes)
    write_record(memoryview(data), layout, digest, content)
    return bytes(data)


def read_record(data: memoryview, layout: KvLayout, digest: bytes | None = None) -> Record:
    """Check a record and open it.

    Args:
        data: begins with the record; what follows it is ignored.
        layout: of the cache that it is for.
        digest: of the block that it must be; None when the caller looks at it itself.

    Raises:
        BadRecordError: which of the three says what is wrong.
    """
    if len(data) < HEADER_BYTES:
        raise CorruptRecordError(f"{len(data)} bytes are no record")
    header = bytes(data[: _HEADER.size])
    magic, first_layer, num_layers, length, layout_digest, block_digest = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise CorruptRecordError("this is no record of a KV block")
    end = HEADER_BYTES + length
    content = data[HEADER_BYTES:end]
    if len(content) != length or bytes(data[_HEADER.size : HEADER_BYTES]) != _checksum(header, content):
        raise CorruptRecordError("the record's checksum is wrong")
    if layout_digest != layout.digest:
        raise WrongLayoutError("the record comes from a cache of another model, type or shape")
    if first_layer + num_layers > layout.num_layers or length != layout.bytes_of(first_layer, num_layers):
        raise WrongBlockError("the record has layers that this model has not")
    if digest is not None and block_digest != digest:
        raise WrongBlockError("the record is another block's")
    return Record(block_digest, first_layer, num_layers, content)


def digest_in_header(data: memoryview, layout: KvLayout) -> bytes | None:
    """The digest of the whole block whose record begins with ``data``, of which only the header is looked at:
    the rest may be wrong. None when it is no such record, or one of another layout.
    """
    if len(data) < HEADER_BYTES:
        return None
    magic, first, count, length, layout_digest, digest = _HEADER.unpack(data[: _HEADER.size])
    is_whole = (first, count, length) == (0, layout.num_layers, layout.block_bytes)
    return digest if magic == _MAGIC and is_whole and layout_digest == layout.digest else None


def _checksum(header: bytes, content: memoryview) -> bytes:
    state = xxh3_128(header)
    state.update(content)
    return state.digest()
