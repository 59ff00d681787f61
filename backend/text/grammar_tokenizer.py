"""A model's vocabulary as the grammar library wants it, for every family alike.

It is made from the byte table that detokenises answers, so what a grammar allows and what a reader gets are
the same bytes. Special tokens can be named by their id and can never be part of a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from backend.text.prompt import ModelText


class _Vocabulary:
    """What :class:`llguidance.TokenizerWrapper` reads."""

    bos_token_id = None

    def __init__(self, text: ModelText, eos_token_id: int) -> None:
        special = text.special_token_ids
        self.eos_token_id = eos_token_id
        self.special_token_ids = sorted(special)
        self.tokens: Sequence[bytes] = [
            token or (b"<|%d|>" % token_id if token_id in special else b"")
            for token_id, token in enumerate(text.token_bytes)
        ]
        self._encode_text = text.encode_text

    def __call__(self, text: str | bytes) -> list[int]:
        """How the model itself would write a text; asked for texts that a grammar leaves no choice of."""
        return self._encode_text(text if isinstance(text, str) else text.decode())


def build_grammar_tokenizer(text: ModelText, eos_token_ids: Iterable[int]) -> LLTokenizer:
    """Build the tokenizer of grammars. Takes about a second for 160,000 tokens.

    Args:
        eos_token_ids: those of the model's configuration; those of its text side are added.

    Raises:
        ValueError: when nothing ends an answer.
    """
    eos = sorted({*eos_token_ids, *text.stop_token_ids})
    if not eos:
        raise ValueError("the model has no token that ends an answer")
    vocabulary = TokenizerWrapper(_Vocabulary(text, eos[0]))
    return LLTokenizer(vocabulary, n_vocab=len(text.token_bytes), eos_token=eos)


def build_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar; whether it could be, its :meth:`~llguidance.LLMatcher.is_error` says.

    Effort is bounded by the library's own limits. The interpreter lock is free meanwhile.
    """
    # Error messages of the library hold the whole grammar, and so the request's schema, unless told not to.
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
