"""White space is held back, never half of a text, and at the same cost however much there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend.text.trimming import NotBlank, RightTrimmed

PIECES = st.lists(st.text("a \n삼", max_size=4), max_size=8)


@given(PIECES)
def test_the_white_space_at_the_end_is_left_out(pieces: list[str]) -> None:
    text = RightTrimmed()
    shown = "".join(text.push(piece) for piece in pieces)
    assert shown == "".join(pieces).rstrip()
    text.end()
    assert text.push("x") == "x"


@given(PIECES)
def test_a_blank_text_is_not_shown(pieces: list[str]) -> None:
    text = NotBlank()
    whole = "".join(pieces)
    shown = "".join(text.push(piece) for piece in pieces)
    assert shown == (whole if whole.strip() else "")
    assert text.end() == ("" if whole.strip() else whole)
    assert text.push(" ") == ""
    assert text.push("x") == " x"
