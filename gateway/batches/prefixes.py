"""What items have in common at their beginnings, so that those that share a prefix run together.

A replica's prefix cache finds what earlier prompts began with. Items are therefore run in the order of their
prompts' text, and those whose first ``prefix_bytes`` are the same form a *group* that one replica gets. A
group is only a matter of speed: whatever cannot be read here has its whole body as its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from xxhash import xxh3_128_hexdigest

from gateway.batches.jobs import NewItem


class _Prompt(msgspec.Struct, frozen=True):
    """The fields that a prompt is rendered from, tools first, as chat templates do it."""

    tools: Any = None
    messages: Any = None
    prompt: Any = None


class Place(msgspec.Struct, frozen=True):
    """Where an item stands in the order of running: by group, then by rank."""

    group: str
    rank: int


_decoder = msgspec.json.Decoder(_Prompt)


def prompt_text(body: bytes) -> bytes:
    """The beginning of what a model will read, in an order that compares like the prompt itself."""
    try:
        prompt = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    parts = [part for part in (prompt.tools, prompt.messages, prompt.prompt) if part is not None]
    return b"\x00".join(msgspec.json.encode(part) for part in parts) if parts else body


def places_of(items: Sequence[NewItem], prefix_bytes: int) -> list[Place]:
    """One place for each item, in the order of the items."""
    texts = [prompt_text(item.body) for item in items]
    places: list[Place | None] = [None] * len(items)
    for rank, index in enumerate(sorted(range(len(items)), key=lambda index: texts[index])):
        places[index] = Place(xxh3_128_hexdigest(texts[index][:prefix_bytes]), rank)
    return [place for place in places if place is not None]
