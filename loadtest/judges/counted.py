"""What a judge counted, and whether the bill says the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loadtest.usage_api import Row

FIGURES = ("prompt_tokens", "cached_tokens", "completion_tokens")
BILLED = ("prompt_tokens", "cached_prompt_tokens", "completion_tokens")
"""The names of the figures in the usage API, in the same order."""


class JudgeError(RuntimeError):
    """A judge that did not come to an end, or left no report; the message says what it said."""


@dataclass(frozen=True)
class Counted:
    """One request of a judge, tokens as the judge counted them. ``request_id`` where the judge knows it."""

    session: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    request_id: str = ""

    @property
    def figures(self) -> tuple[int, int, int]:
        return self.prompt_tokens, self.cached_tokens, self.completion_tokens


@dataclass
class Verdict:
    """Sums of both sides; ``problems`` is empty when every request agrees."""

    num_counted: int
    num_billed: int
    counted: dict[str, int]
    billed: dict[str, int]
    problems: list[str] = field(default_factory=list)


def compare(counted: Sequence[Counted], rows: Mapping[str, Row]) -> Verdict:
    """Hold a judge's requests against the bill's rows of the same sessions (by request id).

    A request whose id the judge knows must agree with that very row. The others of a session must be, figure
    by figure, the other rows of the session in some order.
    """
    verdict = Verdict(
        len(counted),
        len(rows),
        {name: sum(getattr(each, name) for each in counted) for name in FIGURES},
        {
            name: sum(int(row[billed]) for row in rows.values())
            for name, billed in zip(FIGURES, BILLED, strict=True)
        },
    )
    rest = dict(rows)
    for each in counted:
        if not each.request_id:
            continue
        row = rest.pop(each.request_id, None)
        if row is None:
            verdict.problems.append(f"{each.request_id}: counted, and not billed")
        elif _figures(row) != each.figures:
            verdict.problems.append(f"{each.request_id}: counted {each.figures}, billed {_figures(row)}")
    nameless = Counter((each.session, each.figures) for each in counted if not each.request_id)
    billed = Counter((str(row["session"]), _figures(row)) for row in rest.values())
    verdict.problems += [
        f"{session}: {count} counted as {figures}, and not billed so"
        for (session, figures), count in sorted((nameless - billed).items())
    ]
    verdict.problems += [
        f"{session}: {count} billed as {figures}, and not counted so"
        for (session, figures), count in sorted((billed - nameless).items())
    ]
    return verdict


def _figures(row: Row) -> tuple[int, int, int]:
    prompt, cached, completion = (int(row[name]) for name in BILLED)
    return prompt, cached, completion
