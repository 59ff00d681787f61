"""How what takes long speaks to the person who asked for it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

Progress = Callable[[float, str], None]
"""Called with the share done (0 to 1) and what is being done."""


class Voice(msgspec.Struct, frozen=True):
    """``say`` gets a line, ``progress`` moves a bar."""

    say: Callable[[str], None]
    progress: Progress
