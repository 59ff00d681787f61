"""JSON as answers hold it: everything that RFC 8259 calls JSON, also where no number of ours can hold it.

A grammar allows ``1e999`` and ``"\\ud800"``, because JSON does; a decoder that refuses them would call an
answer broken that is not. ``NaN`` and ``Infinity``, which some decoders take, are no JSON.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import msgspec


def read_json(text: str) -> Any:
    """The value of a JSON text; numbers beyond the range of a float are infinite.

    Raises:
        ValueError: it is no JSON, or nested too deep to be read.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        pass  # it may be JSON all the same
    try:
        return json.loads(text, parse_int=_whole_number, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _whole_number(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:  # more digits than Python converts
        return float(digits)


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")
