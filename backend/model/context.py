"""What the layers of a model share during one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backend.engine.forward_batch import ForwardBatch

LayerCache = tuple[Tensor, ...]
"""One layer's part of the paged KV cache; the attention that made it knows its layout."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """The batch, and the rotary table's rows of its positions (``[tokens, rope_dim / 2]`` each)."""

    batch: ForwardBatch
    cos: Tensor
    sin: Tensor
