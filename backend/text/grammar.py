"""From what is demanded of an answer to a grammar, in the Lark form of llguidance.

The grammar covers the whole answer. Reasoning is free text up to the token that ends it, so that nothing
but that can end it, and what is demanded holds for what comes after. Between the tokens of JSON there is at
most one space, after a comma and after a colon: a model that is lost in white space never comes back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from backend.text.answer_rules import AnswerRules, CallMarks
from backend.text.json_schema import without_annotations

_SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_LENIENT: Final = {"lenient": True, "coerce_one_of": True}
# Calls of one conversation are numbered; no conversation has more.
_CALL_NUMBER: Final = "/[0-9]{1,5}/"


def write_grammar(
    rules: AnswerRules, *, marks: CallMarks | None, reasoning_end: int | None, is_lenient: bool = False
) -> str:
    """The grammar of every answer that keeps to the rules.

    Args:
        rules: with at least one demand.
        marks: of the model; needed when there are tools.
        reasoning_end: the token that ends the reasoning in which the answer begins; None when it does not.
        is_lenient: of tools that are not strict, leave out the keywords that no grammar can express.
    """
    lines = ["TEXT: /(.|\\n)+/"]
    has_calls = bool(rules.tools) and marks is not None
    if rules.must_call:
        answer = "calls"
    elif rules.content is not None:
        answer = "json | calls" if has_calls else "json"
    else:
        answer = "TEXT? calls?" if has_calls else "TEXT?"
    start = "answer" if reasoning_end is None else f"TEXT? <[{reasoning_end}]> answer"
    lines += [f"start: {start}", f"answer: {answer}"]
    if rules.content is not None and not rules.must_call:
        lines.append(f"json: {json_rule(rules.content.schema)}")
    if has_calls and marks is not None:
        lines += _call_rules(rules, marks, is_lenient=is_lenient)
    return "\n".join(lines) + "\n"


def json_rule(schema: Any, *, is_lenient: bool = False) -> str:
    """The right side of a rule for JSON of a schema."""
    schema = without_annotations(schema)
    members = dict(schema) if isinstance(schema, Mapping) else {} if schema else {"enum": []}
    # Replaces a member of this name: how strict a grammar is, is not for the request to say.
    members["x-guidance"] = _SPACING | _LENIENT if is_lenient else _SPACING
    return "%json " + json.dumps(members, separators=(",", ":"))


def arguments_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a tool's arguments, which are an object whether it says so or not, and nothing else."""
    return schema if schema.get("type") == "object" else {**schema, "type": "object"}


def _call_rules(rules: AnswerRules, marks: CallMarks, *, is_lenient: bool) -> list[str]:
    most = "" if rules.max_calls == 1 else "+"
    choices = " | ".join(f"call_{index}" for index in range(len(rules.tools)))
    lines = [
        f"calls: <[{marks.section_begin}]> call{most} <[{marks.section_end}]>",
        f"call: <[{marks.call_begin}]> ({choices}) <[{marks.call_end}]>",
    ]
    for index, tool in enumerate(rules.tools):
        prefix = json.dumps(f"functions.{tool.name}:", ensure_ascii=False)
        schema = arguments_schema(tool.schema)
        arguments = json_rule(schema, is_lenient=is_lenient and not tool.is_strict)
        lines += [
            f"call_{index}: {prefix} {_CALL_NUMBER} <[{marks.arguments_begin}]> arguments_{index}",
            f"arguments_{index}: {arguments}",
        ]
    return lines
