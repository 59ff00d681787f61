"""Single blocks of a model's KV cache, read and written as rows of bytes.

Works on every attention's cache alike: each tensor of each layer has the blocks in its first dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from backend.model.context import LayerCache
from backend.transfer.payload import KvLayout


class KvBlocks(Protocol):
    """The KV cache of a replica, block by block (:class:`DeviceKvBlocks` for a replica of one rank)."""

    @property
    def layout(self) -> KvLayout: ...

    def export_blocks(self, blocks: Sequence[int], first_layer: int = 0, num_layers: int = 0) -> Tensor:
        """The contents of ``blocks`` as ``[blocks, bytes]`` uint8 in host memory, of all layers (0) or
        ``num_layers`` from ``first_layer`` on. The tensor belongs to the caller.
        """

    def import_blocks(
        self, blocks: Sequence[int], rows: Tensor, first_layer: int = 0, num_layers: int = 0
    ) -> None:
        """Overwrite (these layers of) ``blocks`` with rows as :meth:`export_blocks` gives them."""


class DeviceKvBlocks:
    """The KV cache of one process; not while a step runs."""

    def __init__(
        self, caches: Sequence[LayerCache], *, model: str, block_size: int, part: str = "1/1"
    ) -> None:
        first = caches[0][0]
        self._caches = tuple(caches)
        self._device = first.device
        self._dtype = first.dtype
        self.layout = KvLayout(
            model=model,
            dtype=str(first.dtype).removeprefix("torch."),
            item_bytes=first.dtype.itemsize,
            block_size=block_size,
            layers=tuple(tuple(tuple(tensor.shape[1:]) for tensor in cache) for cache in caches),
            part=part,
        )

    @torch.inference_mode()
    def export_blocks(self, blocks: Sequence[int], first_layer: int = 0, num_layers: int = 0) -> Tensor:
        """See :class:`KvBlocks`."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        parts = [
            tensor.index_select(0, index).reshape(len(blocks), -1)
            for cache in self._layers(first_layer, num_layers)
            for tensor in cache
        ]
        return torch.cat(parts, dim=1).view(torch.uint8).cpu()

    @torch.inference_mode()
    def import_blocks(
        self, blocks: Sequence[int], rows: Tensor, first_layer: int = 0, num_layers: int = 0
    ) -> None:
        """See :class:`KvBlocks`.

        Raises:
            ValueError: when the rows are not as long as these layers are; nothing is written then.
        """
        count = num_layers or self.layout.num_layers
        width = self.layout.bytes_of(first_layer, count)
        if tuple(rows.shape) != (len(blocks), width):
            raise ValueError(f"rows of {tuple(rows.shape)} are not {len(blocks)} blocks of {width} bytes")
        index = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        numbers = rows.contiguous().to(self._device).view(self._dtype)
        start = 0
        for cache in self._layers(first_layer, num_layers):
            for tensor in cache:
                size = tensor[0].numel()
                part = numbers[:, start : start + size]
                tensor.index_copy_(0, index, part.reshape(len(blocks), *tensor.shape[1:]))
                start += size

    def _layers(self, first_layer: int, num_layers: int) -> Sequence[LayerCache]:
        return self._caches[first_layer : first_layer + (num_layers or self.layout.num_layers)]
