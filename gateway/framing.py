"""Unambiguous joining of byte strings before they are hashed."""

from __future__ import annotations


def framed(*parts: bytes) -> bytes:
    """``parts`` joined so that no two different lists give the same bytes: each is preceded by its length."""
    joined = b""
    for part in parts:
        joined += len(part).to_bytes(4, "big") + part
    return joined
