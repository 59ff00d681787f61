"""What two replicas say to each other over a link. One connection is one prompt.

The replica that will answer asks (:class:`Ask`) and is refused (:class:`Refused`) or accepted
(:class:`Accepted`). Then come blocks (:class:`Block`) in order, each either with its record behind it or with
the slot of the other's exchange that it lies in, which is given back with :class:`Taken`; last :class:`Done`,
or :class:`Refused` when no more can come. Either side ends everything by closing the connection.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from backend.engine.messages import ExchangeInfo, MediaSpan

LinkKind = Literal["nixl", "memory", "tcp"]


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Compute this prompt, whose full blocks from ``first_block`` on are wanted; ``layout`` is the digest of
    what they must be. ``links``: how records may come, best first.
    """

    prompt_token_ids: list[int]
    cache_salt: bytes
    media: tuple[MediaSpan, ...]
    first_block: int
    layout: bytes
    links: list[LinkKind]


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """These slots of your exchange can be filled again."""

    slots: list[int]


class Joined(msgspec.Struct, frozen=True, array_like=True, tag="joined"):
    """How the records will be fetched: what was offered, or ``tcp`` where that cannot be opened here."""

    link: LinkKind


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The prompt is queued; its blocks can come over ``links``. ``exchange`` is where the memory link finds
    them, ``agent`` what NIXL needs to know of this side.
    """

    links: list[LinkKind]
    exchange: ExchangeInfo | None
    agent: bytes = b""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """No (more) blocks will come."""

    reason: str


class Block(msgspec.Struct, frozen=True, array_like=True, tag="block"):
    """The next block's record: behind this message, or in ``slot``. ``cached_tokens`` of the prompt were
    found at first admission; None as long as it is not admitted.
    """

    index: int
    num_bytes: int
    slot: int | None
    cached_tokens: int | None


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """That was the last block."""

    cached_tokens: int


FromAsker = Ask | Joined | Taken
FromPrefill = Accepted | Refused | Block | Done
