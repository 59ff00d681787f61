"""The one kind of error that the command line shows to people: a sentence that says what to do."""

from __future__ import annotations


class Refusal(Exception):  # noqa: N818 - a refusal is an answer to a person, not a fault of the program
    """Something that a person has to put right; the message is one clear sentence with the fix."""
