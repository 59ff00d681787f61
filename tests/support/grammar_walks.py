"""Answers that a grammar allows, chosen at random, without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from backend.config import GrammarConfig
from backend.text.answer_rules import AnswerRules, ContentRule
from backend.text.grammar_compiler import GrammarCompiler
from backend.text.grammar_tokenizer import build_grammar_tokenizer, build_matcher
from backend.text.kimi.model_text import KimiModelText
from backend.text.kimi.template import KimiTemplate
from tests.support.kimi_text import tiny_tokenizer

PARAM = "response_format.json_schema"
# What leads an answer to its end: closing brackets, quotes, and the end itself.
_CLOSERS = frozenset(b'"}],')


@cache
def tiny_text() -> KimiModelText:
    return KimiModelText(tiny_tokenizer(), KimiTemplate())


@cache
def tiny_grammar_tokenizer() -> LLTokenizer:
    return build_grammar_tokenizer(tiny_text(), ())


def new_compiler(**limits: Any) -> GrammarCompiler:
    return GrammarCompiler(tiny_grammar_tokenizer, tiny_text().call_marks, GrammarConfig(**limits))


def content_rules(schema: Any) -> AnswerRules:
    return AnswerRules(ContentRule(schema, PARAM))


class Walk:
    """One walk through a grammar.

    Args:
        grammar: as :class:`GrammarCompiler` writes it.
        rng: makes the choices.
        begin: tokens that were chosen already.
    """

    def __init__(self, grammar: str, rng: random.Random, begin: Sequence[int] = ()) -> None:
        self.token_ids = list(begin)
        self._tokenizer = tiny_grammar_tokenizer()
        self._matcher: LLMatcher = build_matcher(self._tokenizer, grammar)
        self._rng = rng
        assert self._matcher.consume_tokens(self.token_ids), self._matcher.get_error()

    def go(self, max_tokens: int) -> bytes | None:
        """Choose tokens until the answer is complete; its bytes, or None when it takes more tokens."""
        table = tiny_text().token_bytes
        while len(self.token_ids) < max_tokens:
            allowed = self._allowed()
            assert len(allowed), self._matcher.get_error()
            closing = [each for each in allowed if not table[each] or table[each][0] in _CLOSERS]
            eager = closing and self._rng.random() < 0.3
            token_id = int(self._rng.choice(closing if eager else allowed))
            assert self._matcher.consume_token(token_id), self._matcher.get_error()
            if token_id not in self._tokenizer.eos_tokens:
                self.token_ids.append(token_id)
            if self._matcher.is_stopped():
                assert not self._matcher.is_error(), self._matcher.get_error()
                return b"".join(table[each] for each in self.token_ids)
        return None

    def _allowed(self) -> list[int]:
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        assert not self._matcher.is_error(), self._matcher.get_error()
        return [int(each) for each in np.flatnonzero(np.unpackbits(mask, bitorder="little"))]


def accepts(grammar: str, text: str) -> bool:
    """Whether a text is a whole answer in a grammar."""
    matcher = build_matcher(tiny_grammar_tokenizer(), grammar)
    token_ids = tiny_text().encode_text(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
