"""What the layers of a model share during one step."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from torch import Tensor

from backend.engine.forward_batch import ForwardBatch, SingleQueries

LayerCache = tuple[Tensor, ...]
"""One layer's part of the paged KV cache; the attention that made it knows its layout."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """The batch, and the rotary table's rows of its positions (``[tokens, rope_dim / 2]`` each)."""

    batch: ForwardBatch
    cos: Tensor
    sin: Tensor
    _short: dict[int, SingleQueries] = field(default_factory=dict)

    def count_short(self, max_query_len: int) -> int:
        """How many sequences, the first of the batch, have at most so many queries; decodes always do."""
        return bisect_right(self.batch.query_lens, max(max_query_len, 1))

    def single_queries(self, num_sequences: int) -> SingleQueries:
        """The tokens of the first sequences, each as a query of its own; made once for all layers."""
        if num_sequences not in self._short:
            self._short[num_sequences] = self.batch.single_queries(range(num_sequences))
        return self._short[num_sequences]
