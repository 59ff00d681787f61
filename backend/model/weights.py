"""How the model families read their weights: by official name, with the shape they expect."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from backend.model.errors import ModelLoadError, UnsupportedModelError
from backend.model.quant import GROUP_SIZE, AffineBlocks, Matrix

_SUFFIXES = ("_packed", "_scale", "_min")


class TensorSource(Protocol):
    """Tensors by official (safetensors) name: a checkpoint directory or a GGUF file."""

    @property
    def names(self) -> Collection[str]: ...

    def file_of(self, name: str) -> str:
        """The file that holds ``name``, or the place to blame when nothing does."""
        ...

    def read(self, name: str) -> Tensor: ...


class WeightReader:
    """Reads weights once each and remembers what was read, so that nothing in a file is silently unused."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._unread = set(source.names)

    def __contains__(self, name: str) -> bool:
        return name in self._source.names or f"{name}_packed" in self._source.names

    def vector(self, name: str, size: int) -> Tensor:
        """A one-dimensional weight in float32.

        Raises:
            ModelLoadError: when it is missing or has another shape.
        """
        tensor = self._take(name)
        self._check_shape(name, tuple(tensor.shape), (size,))
        return tensor.float()

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A weight of any shape in float32.

        Raises:
            ModelLoadError: when it is missing or has another shape.
        """
        tensor = self._take(name)
        self._check_shape(name, tuple(tensor.shape), shape)
        return tensor.float()

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """A two-dimensional weight as the file has it: a float tensor or affine blocks.

        Raises:
            ModelLoadError: when it is missing or has another shape or type.
        """
        if f"{name}_packed" in self._source.names:
            return self._blocks(name, rows, columns)
        tensor = self._take(name)
        self._check_shape(name, tuple(tensor.shape), (rows, columns))
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise UnsupportedModelError(
                f"{self._source.file_of(name)}: {name}: weights of type {tensor.dtype} are not supported"
            )
        return tensor

    def ignore(self, prefix: str) -> None:
        """Leave out every tensor under ``prefix`` (layers of a kind that inference does not run)."""
        self._unread = {name for name in self._unread if not name.startswith(prefix)}

    def finish(self) -> None:
        """Refuse a checkpoint with tensors that nothing read: it computes something that this engine would
        not.

        Raises:
            UnsupportedModelError: naming one such tensor.
        """
        left = sorted(name for name in self._unread if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise UnsupportedModelError(
                f"{self._source.file_of(left[0])}: {left[0]}: not a tensor of this architecture"
                f" ({len(left)} such in all)"
            )

    def _blocks(self, name: str, rows: int, columns: int) -> AffineBlocks:
        packed, scale, minimum = (self._take(name + suffix) for suffix in _SUFFIXES)
        groups = (rows, columns // GROUP_SIZE)
        self._check_shape(f"{name}_scale", tuple(scale.shape), groups)
        self._check_shape(f"{name}_min", tuple(minimum.shape), groups)
        if packed.dtype != torch.uint8:
            raise ModelLoadError(
                f"{self._source.file_of(f'{name}_packed')}: {name}_packed: type {packed.dtype} must be uint8"
            )
        is_four_bit = tuple(packed.shape) == (rows, columns // 2)
        self._check_shape(
            f"{name}_packed", tuple(packed.shape), (rows, columns // 2 if is_four_bit else columns)
        )
        return AffineBlocks(packed, scale, minimum)

    def _take(self, name: str) -> Tensor:
        if name not in self._source.names:
            raise ModelLoadError(f"{self._source.file_of(name)}: {name}: missing")
        self._unread.discard(name)
        return self._source.read(name)

    def _check_shape(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise ModelLoadError(
                f"{self._source.file_of(name)}: {name}: shape {list(shape)} must be {list(expected)}"
            )
