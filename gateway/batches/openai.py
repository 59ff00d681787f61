"""OpenAI's batches: made of files of lines, shown as objects."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Any

import msgspec

from billing.accounts import Principal
from gateway.batches.archive import BatchArchive
from gateway.batches.config import BatchesConfig
from gateway.batches.files import FileStore, StoredFile
from gateway.batches.jobs import Batch, BatchUsage, ItemCounts, NewBatch
from gateway.batches.queue import BatchQueue
from gateway.batches.submission import LineReader, no_file
from gateway.errors import bad_input

INPUT_PURPOSE = "batch"

_MICROS = 1_000_000
_WINDOW = "24h"
_MAX_METADATA = 16
_MAX_METADATA_KEY = 64
_MAX_METADATA_VALUE = 512
_STATUS = {"queued": "in_progress", "running": "in_progress"}


class BatchOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /v1/batches``."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class OpenAIBatches:
    """Makes and shows batches in OpenAI's form. Blocking; raises StoreError.

    ``endpoints`` are those that items may be sent to.
    """

    def __init__(
        self,
        queue: BatchQueue,
        archive: BatchArchive,
        files: FileStore,
        config: BatchesConfig,
        endpoints: Collection[str],
    ) -> None:
        self._queue = queue
        self._archive = archive
        self._files = files
        self._config = config
        self._endpoints = endpoints

    def create(self, principal: Principal, order: BatchOrder) -> Batch:
        """Read the input file and queue its lines; what is wrong with it makes a batch that has failed.

        Raises:
            Refusal: 400, naming the one wrong field.
            QueueFullError: the account has too much in the queue.
        """
        self._check(order)
        stored = self._files.find(principal.account_id, order.input_file_id)
        if stored is None or stored.batch_id:
            raise no_file(order.input_file_id)
        if stored.purpose != INPUT_PURPOSE:
            raise bad_input("/input_file_id", f"has the purpose {stored.purpose!r}, not {INPUT_PURPOSE!r}")
        reader = LineReader(order.endpoint, self._config.max_items)
        reader.read(self._files.content(stored))
        new = NewBatch(
            id=f"batch_{secrets.token_hex(16)}",
            account_id=principal.account_id,
            token_id=principal.token_id,
            form="openai",
            endpoint=order.endpoint,
            model=reader.model,
            items=[] if reader.problems else reader.items,
            input_file_id=stored.id,
            metadata=msgspec.json.encode(order.metadata),
            problems=reader.problems,
        )
        self._queue.submit(new)
        batch = self._archive.find(principal.account_id, new.id)
        assert batch is not None, "a batch that was just submitted is there"
        return batch

    def show(self, batches: Collection[Batch]) -> list[dict[str, Any]]:
        """The objects of batches, with their counts and usage as of now."""
        counts = self._archive.counts([batch.id for batch in batches])
        return [batch_object(batch, counts[batch.id], self._archive.usage(batch.id)) for batch in batches]

    def _check(self, order: BatchOrder) -> None:
        if not self._config.is_enabled:
            raise bad_input("/", "asynchronous batches are switched off here")
        if order.endpoint not in self._endpoints:
            raise bad_input("/endpoint", f"must be one of {', '.join(sorted(self._endpoints))}")
        if order.completion_window != _WINDOW:
            raise bad_input("/completion_window", f"must be {_WINDOW}")
        metadata = order.metadata or {}
        if len(metadata) > _MAX_METADATA:
            raise bad_input("/metadata", f"must have at most {_MAX_METADATA} entries")
        for key, value in metadata.items():
            if len(key) > _MAX_METADATA_KEY or len(value) > _MAX_METADATA_VALUE:
                raise bad_input(
                    "/metadata",
                    f"keys have at most {_MAX_METADATA_KEY} characters and values {_MAX_METADATA_VALUE}",
                )


def batch_object(batch: Batch, counts: ItemCounts, usage: BatchUsage) -> dict[str, Any]:
    """A batch as OpenAI shows it. Native ones have no files and the endpoint ``/ai/run``."""
    ended = {batch.status: _seconds(batch.ended_at_us)}
    problems = msgspec.json.decode(batch.problems)
    num_failed = counts.failed + counts.expired + counts.cancelled
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": batch.input_file_id,
        "completion_window": _WINDOW,
        "status": _STATUS.get(batch.status, batch.status),
        "output_file_id": batch.output_file_id or None,
        "error_file_id": batch.error_file_id or None,
        "created_at": _seconds(batch.created_at_us),
        "in_progress_at": None if problems else _seconds(batch.started_at_us or batch.created_at_us),
        "expires_at": _seconds(batch.expires_at_us),
        "finalizing_at": ended.get("completed"),
        "completed_at": ended.get("completed"),
        "failed_at": ended.get("failed"),
        "expired_at": ended.get("expired"),
        "cancelling_at": _seconds(batch.cancelling_at_us),
        "cancelled_at": ended.get("cancelled"),
        "request_counts": {
            "total": batch.num_items,
            "completed": counts.succeeded,
            "failed": num_failed,
        },
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
        "metadata": msgspec.json.decode(batch.metadata),
    }


def file_object(stored: StoredFile) -> dict[str, Any]:
    """A file as OpenAI shows it."""
    return {
        "id": stored.id,
        "object": "file",
        "bytes": stored.num_bytes,
        "created_at": _seconds(stored.created_at_us),
        "expires_at": _seconds(stored.expires_at_us),
        "filename": stored.name,
        "purpose": stored.purpose,
        "status": "processed",
    }


def list_object(items: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A page of objects."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }


def _seconds(at_us: int | None) -> int | None:
    return None if at_us is None else at_us // _MICROS
