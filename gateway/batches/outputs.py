"""What ended items look like to clients: one JSON object each, in the form of their batch.

The object of an item that ran is written with its end; that of one that never ran follows from its state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from gateway.batches.jobs import Batch, BatchUsage, ItemState, Lease

_NEVER_RAN = {
    "expired": ("batch_expired", "This request could not be executed before the batch expired."),
    "cancelled": ("batch_cancelled", "This request was not executed, because the batch was cancelled."),
}


class EndedItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item at its end. ``output`` is None for one that never ran."""

    position: int
    reference: bytes
    state: ItemState
    output: bytes | None


class _NativeItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``index`` says what ``id`` says: clients read the one or the other."""

    id: int
    index: int
    success: bool
    external_reference: msgspec.Raw
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: str | msgspec.UnsetType = msgspec.UNSET


class _Response(msgspec.Struct, kw_only=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct, kw_only=True):
    code: str
    message: str


class _Line(msgspec.Struct, kw_only=True):
    id: str
    custom_id: msgspec.Raw
    response: _Response | None
    error: _Error | None


def output_of(lease: Lease, status: int, body: bytes, *, message: str) -> bytes:
    """The object of an item that was answered so; ``message`` says what is wrong."""
    if lease.form == "native":
        return _native(lease.position, lease.reference, body if status == 200 else None, message)
    response = _Response(status_code=status, request_id=lease.request_id, body=msgspec.Raw(body))
    return _line(lease.batch_id, lease.position, lease.reference, response, None)


def output_of_ended(batch: Batch, item: EndedItem) -> bytes:
    """The object of any ended item."""
    if item.output is not None:
        return item.output
    code, message = _NEVER_RAN[item.state]
    if batch.form == "native":
        return _native(item.position, item.reference, None, message)
    return _line(batch.id, item.position, item.reference, None, _Error(code=code, message=message))


def encode_native_result(outputs: Iterable[bytes], usage: BatchUsage) -> bytes:
    """The result of a finished batch, with the items under both names that clients look for."""
    items = b"[" + b",".join(outputs) + b"]"
    counts = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
    }
    return b'{"responses":%b,"results":%b,"usage":%b}' % (items, items, msgspec.json.encode(counts))


def lines_of(batch: Batch, items: Iterable[EndedItem]) -> Iterator[bytes]:
    """The lines of an output or error file."""
    for item in items:
        yield output_of_ended(batch, item) + b"\n"


def _native(position: int, reference: bytes, result: bytes | None, error: str) -> bytes:
    item = _NativeItem(
        id=position, index=position, success=result is not None, external_reference=msgspec.Raw(reference)
    )
    if result is None:
        item.error = error
    else:
        item.result = msgspec.Raw(result)
    return msgspec.json.encode(item)


def _line(
    batch_id: str, position: int, reference: bytes, response: _Response | None, error: _Error | None
) -> bytes:
    line_id = f"batch_req_{batch_id.removeprefix('batch_')}_{position}"
    return msgspec.json.encode(
        _Line(id=line_id, custom_id=msgspec.Raw(reference), response=response, error=error)
    )
