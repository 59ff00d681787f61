"""Usage records as a trace in Mooncake's format: when, how long, what was shared; not who, not what was said.

A record says how many tokens of its prompt were cached, not which prompt they came from. A later turn has
them from its own session; where that is not known, the same digest of the last cached block or a recent
prompt of the account will do. Answers are no prompts: blocks of an answer that the next turn found cached
cannot be shared in this format, and are counted as lost. ``session_id`` and ``cached_length`` are extensions.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from billing.usage import UsageRecord

DEFAULT_BLOCK_TOKENS = 16
_MAX_SESSIONS = 100_000
_MAX_RECENT = 64
_MAX_TURNS = 4

_Owner = tuple[str, str]
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class TraceLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request: ``timestamp`` in ms since the first, lengths in tokens, an id for each block of the prompt
    and all before it.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: str = ""
    cached_length: int = 0


class TraceRecorder:
    """Turns records, in the order of their start, into lines of a trace.

    Attributes:
        prompt_tokens: of all lines.
        cached_tokens: of the records.
        shared_tokens: what an unlimited cache finds of the trace again; the rest of the cached ones is lost.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._chains: OrderedDict[tuple[str, str, str], list[list[int]]] = OrderedDict()
        self._by_head: OrderedDict[str, list[int]] = OrderedDict()
        self._recent: dict[_Owner, deque[list[int]]] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._next_id = 0
        self._start_us: int | None = None
        self.prompt_tokens = self.cached_tokens = self.shared_tokens = 0

    def lines(self, records: Iterable[UsageRecord]) -> Iterator[TraceLine]:
        """A line for each record that has a prompt."""
        for record in records:
            if record.prompt_tokens > 0:
                yield self._line(record)

    def _line(self, record: UsageRecord) -> TraceLine:
        if self._start_us is None:
            self._start_us = record.started_at_us
        shared = self._shared(record)
        num_blocks = -(-record.prompt_tokens // self._block_tokens)
        ids = shared + [self._next_id + offset for offset in range(num_blocks - len(shared))]
        self._next_id += num_blocks - len(shared)
        self._remember(record, ids, ids[: record.cached_prompt_tokens // self._block_tokens])
        self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += record.cached_prompt_tokens
        self.shared_tokens += len(shared) * self._block_tokens
        return TraceLine(
            timestamp=(record.started_at_us - self._start_us) / 1000,
            input_length=record.prompt_tokens,
            output_length=record.completion_tokens,
            hash_ids=ids,
            session_id=self._name(record),
            cached_length=record.cached_prompt_tokens,
        )

    def _shared(self, record: UsageRecord) -> list[int]:
        """Ids of earlier prompts for as many blocks as were cached, or as many as there are."""
        wanted = record.cached_prompt_tokens // self._block_tokens
        if not wanted:
            return []
        own = self._chains.get((record.account_id, record.model, record.session), ())
        chain = _best(own, wanted)
        if len(chain) < wanted and record.cache_head in self._by_head:
            chain = self._by_head[record.cache_head]
        if not chain:
            chain = _best(self._recent.get((record.account_id, record.model), ()), wanted)
        return chain[:wanted]

    def _remember(self, record: UsageRecord, ids: list[int], cached: list[int]) -> None:
        full = ids[: record.prompt_tokens // self._block_tokens]
        if record.session:
            key = (record.account_id, record.model, record.session)
            _keep(self._chains, key, [full, *self._chains.get(key, ())][:_MAX_TURNS])
        if record.cache_head:
            _keep(self._by_head, record.cache_head, cached)
        recent = self._recent.setdefault((record.account_id, record.model), deque(maxlen=_MAX_RECENT))
        recent.appendleft(full)

    def _name(self, record: UsageRecord) -> str:
        if not record.session:
            return ""
        return self._names.setdefault((record.account_id, record.session), f"s{len(self._names)}")


def _best(chains: Iterable[list[int]], wanted: int) -> list[int]:
    """The first that is long enough, or the longest."""
    longest: list[int] = []
    for chain in chains:
        if len(chain) >= wanted:
            return chain
        longest = max(longest, chain, key=len)
    return longest


def _keep(kept: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    """The latest of a bounded number."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > _MAX_SESSIONS:
        kept.popitem(last=False)
