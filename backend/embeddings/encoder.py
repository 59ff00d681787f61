"""Texts to token ids, and batches of token ids to unit vectors. Everything here blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from backend.embeddings.bert import Bert, BertError
from backend.wire import Pooling

Vector = NDArray[np.float32]


class Encoder:
    """One embedding model. ``pooling`` of a request that does not say is the mean over its tokens."""

    def __init__(self, path: Path, *, max_model_len: int) -> None:
        """Load tokenizer and weights. Raises BertError."""
        self._bert = Bert.from_directory(path)
        try:
            self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:
            raise BertError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._begin, self._end = self._frame()
        self.max_model_len = min(max_model_len, self._bert.config.max_position_embeddings)
        self.dimensions = self._bert.config.hidden_size
        self.vocab_size = self._bert.config.vocab_size

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text between the marks of its beginning and its end."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]

    def framed(self, token_ids: list[int]) -> list[int]:
        """Token ids that a client made itself, with the marks that are missing."""
        begin = [] if token_ids[:1] == [self._begin] else [self._begin]
        end = [] if token_ids[-1:] == [self._end] else [self._end]
        return begin + token_ids + end

    def shortened(self, token_ids: list[int]) -> list[int]:
        """At most ``max_model_len`` tokens, the end mark last."""
        if len(token_ids) <= self.max_model_len:
            return token_ids
        return [*token_ids[: self.max_model_len - 1], self._end]

    def embed(self, inputs: Sequence[Sequence[int]], poolings: Sequence[Pooling]) -> list[Vector]:
        """One unit vector for each input."""
        longest = max(map(len, inputs))
        token_ids = torch.zeros((len(inputs), longest), dtype=torch.long)
        mask = torch.zeros((len(inputs), longest), dtype=torch.bool)
        for row, ids in enumerate(inputs):
            token_ids[row, : len(ids)] = torch.tensor(ids, dtype=torch.long)
            mask[row, : len(ids)] = True
        hidden = self._bert.hidden_states(token_ids, mask)
        weights = mask.to(hidden.dtype)[:, :, None]
        means = (hidden * weights).sum(1) / weights.sum(1)
        is_first = torch.tensor([pooling == "cls" for pooling in poolings])[:, None]
        pooled = torch.where(is_first, hidden[:, 0], means)
        vectors = torch.nn.functional.normalize(pooled, dim=-1).numpy()
        return [vectors[row] for row in range(len(inputs))]

    def _frame(self) -> tuple[int, int]:
        ids = self._tokenizer.encode("a").ids
        if len(ids) < 3:
            raise BertError("the tokenizer does not mark the beginning and the end of a text")
        return ids[0], ids[-1]
