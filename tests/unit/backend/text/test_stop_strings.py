"""Nothing of a stop string is ever shown, however the text arrives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.text.stop_strings import StopFilter, StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    stop_filter = StopFilter(StopStrings(stops))
    shown = [stop_filter.push(piece) for piece in pieces]
    if stop_filter.matched is None:
        shown.append(stop_filter.flush())
    return shown, stop_filter.matched


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """The obvious way: the stop that is complete first; of those that end together the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a_stop_over_several_tokens_does_not_leak_its_beginning() -> None:
    shown, matched = run(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J", "K"])
    assert shown == ["ABC", "", "", "", "", ""]
    assert matched == "DEFGHIJ"


def test_a_stop_that_is_part_of_two_words_is_found() -> None:
    shown, matched = run(["own fox"], ["quick ", "brown", " fo", "x jumps"])
    assert "".join(shown) == "quick br"
    assert matched == "own fox"


def test_a_false_beginning_is_released_when_it_cannot_match_any_more() -> None:
    shown, matched = run(["DEFX"], ["AD", "EF", "G"])
    assert shown == ["A", "", "DEFG", ""]
    assert matched is None


def test_what_is_held_at_the_end_is_released() -> None:
    assert run(["END"], ["the E", "N"]) == (["the ", "", "EN"], None)


def test_a_stop_that_repeats_itself_is_found_after_a_false_start() -> None:
    shown, matched = run(["aab"], ["a", "a", "a", "b"])
    assert "".join(shown) == "a"
    assert matched == "aab"


def test_only_the_part_that_can_still_match_is_held_back() -> None:
    stop_filter = StopFilter(StopStrings(["abcabd"]))
    assert stop_filter.push("abcabc") == "abc"


def test_text_without_a_first_character_passes_at_once() -> None:
    assert StopFilter(StopStrings(["#"])).push("plain words") == "plain words"


@pytest.mark.parametrize("pieces", [["one", "\n", "\n", "two"], ["one\n\ntwo"], list("one\n\ntwo")])
def test_how_the_text_is_cut_makes_no_difference(pieces: list[str]) -> None:
    shown, matched = run(["\n\n", "two"], pieces)
    assert ("".join(shown), matched) == ("one", "\n\n")


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", max_size=4), max_size=20),
)
def test_every_cut_gives_what_the_whole_text_gives(stops: list[str], pieces: list[str]) -> None:
    shown, matched = run(stops, pieces)
    assert ("".join(shown), matched) == expected(stops, "".join(pieces))


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=20),
)
def test_nothing_that_could_still_be_part_of_a_stop_is_shown(stops: list[str], pieces: list[str]) -> None:
    stop_filter = StopFilter(StopStrings(stops))
    shown = seen = ""
    for piece in pieces:
        seen += piece
        shown += stop_filter.push(piece)
        if stop_filter.matched is not None:
            break
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        # Exactly the longest suffix that begins a stop string: no more, no less.
        longest = max((k for s in stops for k in range(len(s)) if seen.endswith(s[:k])), default=0)
        assert len(held) == longest
