"""Public data that some tests compare with; it is not part of the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


def shared_data(name: str) -> Path:
    """A file or folder of it; the test is skipped when it is not at hand.

    It is looked for in ``EMBERGATE_SHARED_DATA``, or else in ``shared/data`` beside the checkout.
    """
    folder = Path(os.environ.get("EMBERGATE_SHARED_DATA") or _ROOT.parent / "shared" / "data")
    path = folder / name
    if not path.exists():
        pytest.skip(f"shared data {name} is not at hand (EMBERGATE_SHARED_DATA names its folder)")
    return path
