"""Compiles the grammar of a request beside the event loop, within bounds, and remembers it.

Whatever cannot be compiled is refused before anything is queued, with the field and the keyword that are in
the way. The engine compiles the same source again for its own process, which then cannot fail.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
from llguidance import LLTokenizer

from backend.config import GrammarConfig
from backend.text.answer_rules import AnswerRules, CallMarks
from backend.text.grammar import arguments_schema, json_rule, write_grammar
from backend.text.grammar_tokenizer import build_matcher
from backend.text.json_schema import Path, SchemaError, check_schema, find_schema

_COMPILER_SAYS: Final = re.compile(r"failed to compile JSON schema: (.*?)(?:\n|$)")
_MAX_PROBLEM_CHARS: Final = 300


class BadGrammarError(ValueError):
    """A demand that cannot be met.

    Args:
        param: the field of the request that is in the way, down to the keyword.
        problem: what is wrong with it.
    """

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(problem)
        self.param = param


class CompilerBusyError(Exception):
    """Too many requests wait for their grammars already."""


class GrammarCompiler:
    """Grammars of one model. Belongs to one event loop; :meth:`close` ends its thread.

    Args:
        build_tokenizer: makes the vocabulary of grammars, when the first one is needed.
        marks: around the model's tool calls, if it makes any.
        config: the bounds.
    """

    def __init__(
        self, build_tokenizer: Callable[[], LLTokenizer], marks: CallMarks | None, config: GrammarConfig
    ) -> None:
        self._build_tokenizer = build_tokenizer
        self._marks = marks
        self._config = config
        self._tokenizer: LLTokenizer | None = None
        self._cache: OrderedDict[bytes, str | BadGrammarError] = OrderedDict()
        self._num_pending = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    @property
    def num_cached(self) -> int:
        return len(self._cache)

    async def compile(self, rules: AnswerRules, *, reasoning_end: int | None) -> str:
        """The grammar of answers that keep to ``rules``, proved to compile.

        Raises:
            BadGrammarError: naming the field that is in the way.
            CompilerBusyError: when too many wait.
        """
        key = self._key(rules, reasoning_end)
        known = self._cache.get(key)
        if known is None:
            known = await self._compile(rules, reasoning_end)
            self._cache[key] = known
            if len(self._cache) > self._config.max_cached:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        if isinstance(known, BadGrammarError):
            raise known.with_traceback(None)
        return known

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _key(self, rules: AnswerRules, reasoning_end: int | None) -> bytes:
        try:
            said = msgspec.json.encode([rules, reasoning_end])
        except RecursionError:
            raise BadGrammarError(_param_of(rules), "is nested too deep") from None
        limit = self._config.max_schema_chars
        if len(said) > limit:
            raise BadGrammarError(_param_of(rules), f"at most {limit} characters of schemas are allowed")
        return hashlib.blake2b(said, digest_size=32).digest()

    async def _compile(self, rules: AnswerRules, reasoning_end: int | None) -> str | BadGrammarError:
        if self._num_pending >= self._config.max_pending_compiles:
            raise CompilerBusyError
        self._num_pending += 1
        loop = asyncio.get_running_loop()
        work = self._thread.submit(self._try, rules, reasoning_end)
        work.add_done_callback(lambda _: self._done(loop))
        try:
            async with asyncio.timeout(self._config.max_compile_s):
                return await asyncio.wrap_future(work)
        except TimeoutError:
            if work.cancel():  # it never began: others were in the way
                raise CompilerBusyError from None
            limit = self._config.max_compile_s
            return BadGrammarError(_param_of(rules), f"takes longer than {limit:g} s to compile")

    def _done(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called in the thread, or where the work was cancelled; counts on the loop."""
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._count_done)

    def _count_done(self) -> None:
        self._num_pending -= 1

    def _try(self, rules: AnswerRules, reasoning_end: int | None) -> str | BadGrammarError:
        try:
            return self._compile_now(rules, reasoning_end)
        except BadGrammarError as error:
            return error

    def _compile_now(self, rules: AnswerRules, reasoning_end: int | None) -> str:
        for tool in rules.tools:
            kinds = tool.schema.get("type", "object")
            if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
                raise BadGrammarError(f"{tool.param}.type", "must be 'object', as arguments are")
        for param, schema, _ in _schemas(rules):
            try:
                check_schema(schema)
            except SchemaError as error:
                raise BadGrammarError(_join(param, error.path), error.problem) from error
        if self._tokenizer is None:
            self._tokenizer = self._build_tokenizer()
        can_be_lenient = any(not tool.is_strict for tool in rules.tools)
        for is_lenient in (False, True) if can_be_lenient else (False,):
            grammar = write_grammar(
                rules, marks=self._marks, reasoning_end=reasoning_end, is_lenient=is_lenient
            )
            matcher = build_matcher(self._tokenizer, grammar)
            if not matcher.is_error() and any(matcher.compute_bitmask()) and not matcher.is_error():
                return grammar
        raise self._explain(rules, matcher.get_error())

    def _explain(self, rules: AnswerRules, problem: str) -> BadGrammarError:
        """Find the schema that is at fault, and the place in it."""
        assert self._tokenizer is not None
        for param, schema, is_lenient in _schemas(rules):
            grammar = f"start: json\njson: {json_rule(schema, is_lenient=is_lenient)}\n"
            matcher = build_matcher(self._tokenizer, grammar)
            if matcher.is_error():
                return _explain_schema(param, schema, matcher.get_error())
        return BadGrammarError(_param_of(rules), f"cannot be made a grammar: {_first_line(problem)}")


def _schemas(rules: AnswerRules) -> list[tuple[str, Any, bool]]:
    """Field, schema, and whether it may be read leniently."""
    schemas: list[tuple[str, Any, bool]] = []
    if rules.content is not None:
        schemas.append((rules.content.param, rules.content.schema, False))
    schemas += [(tool.param, arguments_schema(tool.schema), not tool.is_strict) for tool in rules.tools]
    return schemas


def _param_of(rules: AnswerRules) -> str:
    return rules.content.param if rules.content is not None else "tools"


def _explain_schema(param: str, schema: Any, error: str) -> BadGrammarError:
    said = _COMPILER_SAYS.search(error)
    problem = _first_line(said[1] if said else error)
    path = _place_of(schema, problem, error)
    return BadGrammarError(_join(param, path or ()), f"is not supported: {problem}")


def _place_of(schema: Any, problem: str, error: str) -> Path | None:
    """Where in the schema the compiler's complaint is about, as far as it says."""
    if problem.startswith("Unimplemented keys: "):
        keys = json.loads(problem.removeprefix("Unimplemented keys: "))
        return _place_of_key(schema, lambda key, value: key in keys)
    if problem.startswith("Unknown format: "):
        kind = problem.removeprefix("Unknown format: ")
        return _place_of_key(schema, lambda key, value: key == "format" and value == kind)
    if problem.startswith("oneOf constraints"):
        return _place_of_key(schema, lambda key, value: key == "oneOf")
    if problem.startswith("Invalid type: "):
        return _place_of_key(schema, lambda key, value: key == "type" and str(value) in problem)
    if problem.startswith("Resource "):
        return _place_of_key(schema, lambda key, value: key == "$ref" and str(value) in problem)
    if "regex" in problem:
        return _place_of_key(schema, lambda key, value: key == "pattern" and str(value) in error)
    return None


def _place_of_key(schema: Any, is_it: Callable[[str, Any], bool]) -> Path | None:
    found: list[str] = []

    def has_it(each: Mapping[str, Any]) -> bool:
        found[:] = [key for key, value in each.items() if is_it(key, value)][:1]
        return bool(found)

    path = find_schema(schema, has_it)
    return None if path is None else (*path, found[0])


def _join(param: str, path: Path) -> str:
    return ".".join([param, *map(str, path)])


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0][:_MAX_PROBLEM_CHARS]
