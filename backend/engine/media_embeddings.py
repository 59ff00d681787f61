"""What the images of a step become before the model reads them.

An image is embedded when the first of its tokens is computed. The embeddings are kept for the chunks that
hold the rest of it and for later prompts of the same account, as far as there is room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from backend.engine.forward_batch import ForwardBatch
from backend.engine.messages import MediaSpan
from backend.engine.step import StepPlan
from backend.model.transformer import Overlay
from backend.model.vision import Grid, VisionTower

Pause = Callable[[], None]


class MediaEmbeddings:
    """Embeds images, and remembers the embeddings that were used last.

    The key is the account's salt with the image's whole digest, and an entry of another length than the
    image's is no match: a wrong reuse would show one user's image to another.

    Args:
        tower: what embeds.
        max_bytes: of embeddings kept; the last one is kept whatever its size, for the rest of its prompt.
    """

    def __init__(self, tower: VisionTower, max_bytes: int) -> None:
        self._tower = tower
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[bytes, bytes], Tensor] = OrderedDict()
        self._num_bytes = 0
        self.num_computed = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of embeddings kept."""
        return self._num_bytes

    def embed(self, span: MediaSpan, salt: bytes, pause: Pause = lambda: None) -> Tensor:
        """The embeddings ``[num_tokens, hidden]`` of an image.

        Raises:
            ValueError: when its patches are not those of so many tokens.
        """
        key = (salt, span.digest)
        kept = self._kept.get(key)
        if kept is not None and len(kept) == span.num_tokens:
            self._kept.move_to_end(key)
            return kept
        embeddings = self._compute(span, pause)
        self._keep(key, embeddings)
        return embeddings

    def _compute(self, span: MediaSpan, pause: Pause) -> Tensor:
        grid, size = Grid(span.rows, span.columns), self._tower.config.patch_size
        num_bytes = grid.num_patches * 3 * size * size
        if len(span.patches) != num_bytes or span.num_tokens != self._tower.num_tokens(grid):
            raise ValueError(f"media: {len(span.patches)} bytes are not {span.num_tokens} tokens of {grid}")
        # A copy, as torch wants memory that may be written to.
        pixels = torch.frombuffer(bytearray(span.patches), dtype=torch.uint8).view(-1, 3, size, size)
        self.num_computed += 1
        return self._tower.encode(pixels, grid, pause)

    def _keep(self, key: tuple[bytes, bytes], embeddings: Tensor) -> None:
        replaced = self._kept.pop(key, None)
        if replaced is not None:
            self._num_bytes -= replaced.nbytes
        self._kept[key] = embeddings
        self._num_bytes += embeddings.nbytes
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.nbytes


def build_overlay(
    plan: StepPlan, batch: ForwardBatch, media: MediaEmbeddings | None, pause: Pause = lambda: None
) -> Overlay | None:
    """Embed the images of a step, and say which rows of its batch they go to; None when there are none.

    Args:
        plan: the step.
        batch: made of it.
        media: of the model; None for one without vision.
        pause: called before every layer of the tower; may raise to end the work.

    Raises:
        ValueError: when there are images and the model has no vision, or an image does not fit its tokens.
    """
    rows: list[Tensor] = []
    embeddings: list[Tensor] = []
    for chunk, first_row in zip(plan.chunks, batch.first_rows, strict=True):
        for span in chunk.media:
            if media is None:
                raise ValueError("media: this model has no vision tower")
            start = max(span.start, chunk.start)
            end = min(span.end, chunk.start + len(chunk.token_ids))
            row = first_row + start - chunk.start
            rows.append(torch.arange(row, row + end - start))
            embeddings.append(
                media.embed(span, chunk.cache_salt, pause)[start - span.start : end - span.start]
            )
    if not rows:
        return None
    return Overlay(torch.cat(rows).to(batch.token_ids.device), torch.cat(embeddings))
