"""From demands to grammars: what is supported, what is refused and how, and that nothing slips through."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer

from backend.config import GrammarConfig
from backend.text.answer_rules import AnswerRules, ContentRule, ToolRule
from backend.text.grammar_compiler import BadGrammarError, CompilerBusyError, GrammarCompiler
from backend.text.json_schema import STANDARD_FORMATS
from tests.support.grammar_walks import (
    PARAM,
    Walk,
    accepts,
    content_rules,
    new_compiler,
    tiny_grammar_tokenizer,
    tiny_text,
)
from tests.support.kimi_answers import make_form, read_tokens
from tests.support.shared_data import shared_data

WEATHER = ToolRule(
    "get_weather",
    {"type": "object", "properties": {"city": {"enum": ["Köln", "Oslo"]}}, "required": ["city"],
     "additionalProperties": False},
    True,
    "tools.0.function.parameters",
)  # fmt: skip
READ = ToolRule(
    "fs.read-file:v2",
    {"properties": {"path": {"type": "string"}}, "additionalProperties": False},
    False,
    "tools.1.function.parameters",
)
# Good instances of theirs have properties in another order than the schema's, which answers have.
OTHER_ORDER = frozenset({"Github_easy---o10094.json", "Kubernetes---kb_1147_Normalized.json"})
THINK_END = tiny_text().tokenizer.special_tokens["</think>"]


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = new_compiler()
    yield compiler
    compiler.close()


async def grammar_of(compiler: GrammarCompiler, schema: Any) -> str:
    return await compiler.compile(content_rules(schema), reasoning_end=None)


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        ({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, ".$ref", "leads back to itself"),
        ({"properties": {"a": {"not": {}}}}, ".properties.a.not", "not"),
        ({"items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, ".items.oneOf", "oneOf"),
        ({"properties": {"a": {"type": "string", "format": "iri"}}}, ".properties.a.format", "iri"),
        ({"type": "strung"}, ".type", "strung"),
        ({"$ref": "http://example.com/schema"}, ".$ref", "http://example.com/schema"),
        ({"type": "string", "pattern": "(?=a)b"}, ".pattern", "regex"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "", "minimum"),
        (False, "", "nsatisfiable"),
        ({"enum": []}, "", "nsatisfiable"),
    ],
)
async def test_a_schema_that_cannot_be_met_is_refused_by_name(
    compiler: GrammarCompiler, schema: Any, place: str, words: str
) -> None:
    for _ in range(2):  # the second time out of the cache
        with pytest.raises(BadGrammarError, match=words.replace(".", r"\.")) as error:
            await grammar_of(compiler, schema)
        assert error.value.param == PARAM + place
    assert compiler.num_cached == 1


async def test_a_request_cannot_loosen_its_grammar(compiler: GrammarCompiler) -> None:
    loose = {"lenient": True, "whitespace_flexible": True}
    grammar = await grammar_of(compiler, {"type": "array", "x-guidance": loose})
    assert accepts(grammar, "[1, 2,3]")
    assert not accepts(grammar, "[1,  2]")
    with pytest.raises(BadGrammarError):
        await grammar_of(compiler, {"not": {}, "x-guidance": loose})


@pytest.mark.parametrize("gap", ["  ", "\n", "\t", " \n" * 40])
async def test_white_space_is_bounded(compiler: GrammarCompiler, gap: str) -> None:
    """BR-50."""
    grammar = await grammar_of(compiler, {"type": "object"})
    assert accepts(grammar, '{"a": 1, "b":[true,null]}')
    for text in (
        f'{gap}{{"a":1}}',
        f'{{{gap}"a":1}}',
        f'{{"a":{gap}1}}',
        f'{{"a":1{gap}}}',
        f'{{"a":1}}{gap}',
    ):
        assert not accepts(grammar, text), text


async def test_an_answer_that_thinks_is_free_until_it_has_thought(compiler: GrammarCompiler) -> None:
    grammar = await compiler.compile(content_rules({"const": {"a": 1}}), reasoning_end=THINK_END)
    walk = Walk(grammar, random.Random(1))
    assert walk.go(40) is None  # nothing but the one mark ends the thoughts
    special = tiny_text().special_token_ids
    assert not special & set(walk.token_ids)
    for seed in range(20):
        # The mark has no chance of being guessed among free text, so begin behind it.
        answer = Walk(grammar, random.Random(seed), [*tiny_text().encode_text("Hm."), THINK_END]).go(40)
        assert answer in (b'Hm.</think>{"a":1}', b'Hm.</think>{"a": 1}')


@pytest.mark.parametrize("max_calls", [None, 1])
async def test_calls_that_must_be_made_are_made(compiler: GrammarCompiler, max_calls: int | None) -> None:
    rules = AnswerRules(None, (WEATHER, READ), must_call=True, max_calls=max_calls)
    grammar = await compiler.compile(rules, reasoning_end=None)
    most = 0
    for seed in range(40):
        walk = Walk(grammar, random.Random(seed))
        if walk.go(600) is None:
            continue
        message = read_tokens(walk.token_ids, form=make_form(is_thinking=False))
        assert message.calls
        assert not message.failures
        assert message.content == ""
        assert message.finish_reason == "tool_calls"
        most = max(most, len(message.calls))
        for name, arguments in message.calls:
            tool = next(each for each in (WEATHER, READ) if each.name == name)
            jsonschema.validate(json.loads(arguments), {"type": "object", **tool.schema})
    assert most == 1 if max_calls else most > 1


async def test_strict_tools_hold_while_the_rest_stays_free(compiler: GrammarCompiler) -> None:
    grammar = await compiler.compile(AnswerRules(None, (WEATHER,)), reasoning_end=None)
    assert accepts(grammar, "")
    assert accepts(grammar, "Just text, {with} [anything]\n\n\n.")
    with pytest.raises(BadGrammarError) as error:
        await compiler.compile(
            AnswerRules(None, (READ, ToolRule("f", {"not": {}}, True, "tools.1.function.parameters"))),
            reasoning_end=None,
        )
    assert error.value.param == "tools.1.function.parameters.not"


@pytest.mark.parametrize("kind", ["int32", "color", "phone", "password", "odd", ""])
async def test_a_format_that_no_specification_defines_is_an_annotation(
    compiler: GrammarCompiler, kind: str
) -> None:
    inner = {"type": "string", "format": kind, "maxLength": 3}
    schema = {"properties": {"format": inner, "b": {"enum": [{"format": kind}]}}, "format": kind}
    grammar = await grammar_of(compiler, schema)
    assert accepts(grammar, '{"format":"abc"}')
    assert not accepts(grammar, '{"format":"abcd"}'), "other keywords beside it hold"
    assert accepts(grammar, json.dumps({"b": {"format": kind}}, separators=(",", ":"))), (
        "values are no schemas"
    )
    assert inner["format"] == kind, "the request's schema stays as it was"


@pytest.mark.parametrize("name", ["#user", "https://example.com/user#/definitions/name"])
async def test_a_name_of_an_older_draft_is_in_nobodys_way(compiler: GrammarCompiler, name: str) -> None:
    schema = {"$id": name, "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"const": 1}}}
    grammar = await grammar_of(compiler, schema)
    assert accepts(grammar, '{"a":1}')
    assert not accepts(grammar, '{"a":2}')


async def test_a_format_that_is_defined_is_kept_to_or_refused(compiler: GrammarCompiler) -> None:
    """Whatever the library comes to know: no defined format is left out in silence."""
    refused = []
    for kind in sorted(STANDARD_FORMATS):
        try:
            grammar = await grammar_of(compiler, {"type": "string", "format": kind})
        except BadGrammarError as error:
            refused.append((kind, error.param))
        else:
            assert not accepts(grammar, '"no such thing {"'), kind
    assert {param for _, param in refused} == {f"{PARAM}.format"}
    assert len(refused) <= 9


async def test_tools_that_are_not_strict_may_have_any_keyword(compiler: GrammarCompiler) -> None:
    odd = ToolRule(
        "f", {"properties": {"a": {"not": {"type": "null"}}}}, False, "tools.0.function.parameters"
    )
    grammar = await compiler.compile(AnswerRules(None, (odd,), must_call=True), reasoning_end=None)
    assert '"lenient":true' in grammar


async def test_json_or_calls(compiler: GrammarCompiler) -> None:
    rules = AnswerRules(ContentRule({"type": "integer"}, PARAM), (WEATHER,))
    grammar = await compiler.compile(rules, reasoning_end=None)
    assert accepts(grammar, "17")
    assert not accepts(grammar, "text")


async def test_what_is_kept_is_bounded_and_found_again() -> None:
    compiler = new_compiler(max_cached=3)
    grammars = [await grammar_of(compiler, {"const": number}) for number in range(8)]
    assert compiler.num_cached == 3
    assert await grammar_of(compiler, {"const": 7}) is grammars[7]
    compiler.close()


async def test_schemas_are_bounded_in_size() -> None:
    compiler = new_compiler(max_schema_chars=1000)
    with pytest.raises(BadGrammarError, match="at most 1000 characters") as error:
        await grammar_of(compiler, {"enum": ["x" * 10] * 100})
    assert error.value.param == PARAM
    compiler.close()


async def test_a_compilation_is_bounded_in_time_and_others_are_not_blamed_for_it() -> None:
    def build() -> LLTokenizer:
        time.sleep(0.3)
        return tiny_grammar_tokenizer()

    config = GrammarConfig(max_compile_s=0.05, max_pending_compiles=2)
    compiler = GrammarCompiler(build, None, config)
    slow = asyncio.create_task(grammar_of(compiler, {"const": 1}))
    await asyncio.sleep(0.01)
    queued = asyncio.create_task(grammar_of(compiler, {"const": 2}))
    await asyncio.sleep(0.01)
    with pytest.raises(CompilerBusyError):
        await grammar_of(compiler, {"const": 3})
    with pytest.raises(BadGrammarError, match=r"takes longer than 0\.05 s"):
        await slow
    with pytest.raises(CompilerBusyError):
        await queued
    await asyncio.sleep(0.4)
    assert await grammar_of(compiler, {"const": 4})
    compiler.close()


async def test_the_event_loop_goes_on_while_a_large_schema_is_compiled(compiler: GrammarCompiler) -> None:
    """Half a second and more of compiling, none of which any stream of the replica may feel."""
    choices = [
        {"type": "object", "properties": {"kind": {"const": number}, f"size{number}": {"type": "integer"}}}
        for number in range(500)
    ]
    await grammar_of(compiler, {"const": 1})  # the vocabulary is there
    started_at = time.perf_counter()
    compiling = asyncio.create_task(grammar_of(compiler, {"anyOf": choices}))
    gaps = []
    while not compiling.done():
        beat_at = time.perf_counter()
        await asyncio.sleep(0.001)
        gaps.append(time.perf_counter() - beat_at)
    await compiling
    took_s = time.perf_counter() - started_at
    assert took_s > 0.1, "not worth the name"
    assert len(gaps) > 20
    assert max(gaps) < max(0.1, took_s / 3)


# A sixth of the schemas is enough to notice a change, the rest is for whoever has a minute.
@pytest.mark.parametrize(
    ("share", "num_supported"),
    [
        (0, 62),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, 63), (2, 60), (3, 57), (4, 57), (5, 60))
        ),
    ],
)
async def test_real_schemas_are_met_or_refused(
    compiler: GrammarCompiler, share: int, num_supported: int
) -> None:
    """Of 400 schemas from everywhere: none is accepted and violated, and none takes long."""
    lines = shared_data("json-schemas/maskbench-400.jsonl").read_text().splitlines()[share::6]
    counts: Counter[str] = Counter()
    rng = random.Random(share)
    for case in map(json.loads, lines):
        started_at = time.perf_counter()
        try:
            grammar = await grammar_of(compiler, case["schema"])
        except BadGrammarError:
            counts["refused"] += 1
            continue
        counts["supported"] += 1
        kind = jsonschema.validators.validator_for(case["schema"], default=jsonschema.Draft202012Validator)
        # As decimals, so that 65.41 is a multiple of 0.01.
        validator = kind(json.loads(json.dumps(case["schema"]), parse_float=Decimal))
        for instance in case["tests"]:
            text = json.dumps(instance["data"], separators=(",", ":"), ensure_ascii=False)
            if accepts(grammar, text) != instance["valid"]:
                assert instance["valid"], ("accepted and violated", case["name"], instance["description"])
                assert case["name"] in OTHER_ORDER, (case["name"], instance["description"])
        for _ in range(2):
            answer = Walk(grammar, rng).go(400)
            counts["complete" if answer is not None else "unfinished"] += 1
            if answer is not None:
                assert not list(validator.iter_errors(json.loads(answer, parse_float=Decimal))), (
                    case["name"],
                    answer,
                )
        assert time.perf_counter() - started_at < 20, case["name"]
    assert counts["supported"] >= num_supported, counts
    assert counts["complete"] > counts["supported"], counts


@pytest.mark.parametrize("kinds", ["array", ["string", "null"]])
async def test_arguments_that_are_no_object_are_refused(compiler: GrammarCompiler, kinds: Any) -> None:
    tool = ToolRule("f", {"type": kinds}, True, "tools.0.function.parameters")
    with pytest.raises(BadGrammarError, match="must be 'object'") as caught:
        await compiler.compile(AnswerRules(tools=(tool,), must_call=True), reasoning_end=None)
    assert caught.value.param == "tools.0.function.parameters.type"


async def test_arguments_that_may_be_nothing_are_an_object(compiler: GrammarCompiler) -> None:
    schema = {"type": ["object", "null"], "properties": {}, "additionalProperties": False}
    tool = ToolRule("f", schema, True, "tools.0.function.parameters")
    grammar = await compiler.compile(AnswerRules(tools=(tool,), must_call=True), reasoning_end=None)
    assert "null" not in grammar
