"""Grammars in the engine: where each sequence stands in its own, and which tokens may come next.

A grammar is compiled beside the engine's loop, from the moment its sequence is known, and the sequence is
admitted when it is there. A sequence's place in its grammar is a function of its generated tokens
alone: preemption and recomputation change nothing.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from backend.engine.sequence import Sequence
from backend.text.grammar_tokenizer import build_matcher

Words = npt.NDArray[np.int32]

Compilation = Future[LLMatcher]
"""A grammar on its way."""

_BITS_PER_WORD = 32


class GrammarError(Exception):
    """A sequence cannot go on in its grammar. The message holds nothing of a request."""


class TokenGrammar:
    """Where one sequence stands in its grammar."""

    __slots__ = ("_matcher", "_num_consumed")

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._num_consumed = 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped()

    def follow(self, sequence: Sequence) -> None:
        """Stand behind all that the sequence has generated; usually that is where it stands already.

        Raises:
            GrammarError: when the sequence has left its grammar.
        """
        num_new = sequence.num_generated_tokens - self._num_consumed
        if num_new < 0:
            self._matcher.rollback(-num_new)
        elif num_new > 0:
            self._matcher.consume_tokens(sequence.token_ids[-num_new:])
        self._num_consumed += num_new
        self._raise_errors()

    def accept(self, token_id: int) -> None:
        """Go on by the token that the sequence generates next.

        Raises:
            GrammarError: when it is not in the grammar.
        """
        self._matcher.consume_token(token_id)
        self._num_consumed += 1
        self._raise_errors()

    def fill(self, mask: Words) -> None:
        """Set the bits of the tokens that may come next, and no others, in ``[words]``.

        Raises:
            GrammarError: when none may, or the grammar takes too much effort here.
        """
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._raise_errors()
        if not mask.any():
            raise GrammarError("the grammar of this answer allows no token here")

    def _raise_errors(self) -> None:
        if self._matcher.is_error():
            raise GrammarError("the grammar of this answer failed")


class GrammarPool:
    """Compiles grammars in a thread and keeps the last ones.

    Args:
        build_tokenizer: makes the vocabulary of grammars; called in the thread, at once.
        max_rows: rows of a step.
        max_cached: grammars kept.
    """

    def __init__(self, build_tokenizer: Callable[[], LLTokenizer], *, max_rows: int, max_cached: int) -> None:
        self._max_rows = max_rows
        self._max_cached = max_cached
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._tokenizer = self._thread.submit(build_tokenizer)
        self._compiled: OrderedDict[bytes, Future[LLMatcher]] = OrderedDict()
        self._masks: Words | None = None

    @property
    def num_cached(self) -> int:
        return len(self._compiled)

    def prepare(self, grammar: str) -> Compilation:
        """Begin to compile a grammar that will be needed; done when :meth:`new` will not wait for it."""
        return self._find(grammar)

    def new(self, grammar: str) -> TokenGrammar:
        """The beginning of a grammar; waits until it is compiled.

        Raises:
            GrammarError: when it cannot be.
        """
        try:
            matcher = self._find(grammar).result()
        except Exception as error:
            raise GrammarError(
                f"the grammar of this answer cannot be used: {type(error).__name__}"
            ) from error
        if matcher.is_error():
            raise GrammarError("the grammar of this answer cannot be compiled")
        return TokenGrammar(matcher.deep_copy())

    def mask(self, index: int) -> Words:
        """Row ``index`` of the masks, ``[words]`` int32: bit i of word w is token ``32 * w + i``."""
        if self._masks is None:
            num_words = -(-self._tokenizer.result().vocab_size // _BITS_PER_WORD)
            self._masks = np.zeros((self._max_rows, num_words), dtype=np.int32)
        mask: Words = self._masks[index]
        return mask

    def forbid(self, logits: Tensor, rows: ListOf[int]) -> None:
        """Apply masks 0 to ``len(rows) - 1`` to those rows of ``[rows, vocab]`` logits, in place."""
        if rows and self._masks is not None:
            apply_masks(logits, self._masks[: len(rows)], rows)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _find(self, grammar: str) -> Future[LLMatcher]:
        key = hashlib.blake2b(grammar.encode(), digest_size=32).digest()
        found = self._compiled.get(key)
        if found is None:
            found = self._compiled[key] = self._thread.submit(self._compile, grammar)
            if len(self._compiled) > self._max_cached:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(key)
        return found

    def _compile(self, grammar: str) -> LLMatcher:
        return build_matcher(self._tokenizer.result(), grammar)


def apply_masks(logits: Tensor, masks: Words, rows: ListOf[int]) -> None:
    """Set what masks forbid to minus infinity.

    Args:
        logits: ``[any, vocab]``, changed in place.
        masks: ``[len(rows), ceil(vocab / 32) or more]`` int32; bit i of word w allows token ``32 * w + i``.
        rows: which row of the logits each mask is for, each once.
    """
    vocab = logits.shape[1]
    if logits.device.type == "cpu":
        # numpy's conditional copy is several times faster here than torch's masked fill.
        bits = np.unpackbits(np.invert(masks).view(np.uint8), axis=1, count=vocab, bitorder="little")
        values = logits.numpy()
        for forbidden, row in zip(bits.view(np.bool_), rows, strict=True):
            np.copyto(values[row], -np.inf, where=forbidden)
        return
    words = torch.from_numpy(masks).to(logits.device)
    shifts = torch.arange(_BITS_PER_WORD, dtype=torch.int32, device=logits.device)
    allowed = ((words.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, :vocab]
    for index, row in enumerate(rows):
        logits[row].masked_fill_(allowed[index] == 0, -torch.inf)
