"""Unambiguous joining of byte strings before they are hashed."""

from __future__ import annotations


def framed(*parts: bytes) -> bytes:
    """``parts`` joined so that no two different lists give the same bytes: each is preceded by its length."""
    return b"".join([len(part).to_bytes(4, "big") + part for part in parts])
