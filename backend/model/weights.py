"""How the model families read their weights: by official name, with the shape they expect."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from backend.model.errors import ModelLoadError, UnsupportedModelError
from backend.model.quant import GROUP_SIZE, AffineBlocks, Matrix
from backend.model.quant_config import FP8_BLOCK
from backend.model.stored_forms import blocks_of_int4, dequantise_fp8

_SUFFIXES = ("_packed", "_scale", "_min")
_WORD_COLUMNS = 8


class TensorSource(Protocol):
    """Tensors by official (safetensors) name: a checkpoint directory or a GGUF file."""

    @property
    def names(self) -> Collection[str]: ...

    def place_of(self, name: str) -> str:
        """The file that holds ``name`` (or the one to blame when none does), a colon, and its name there."""
        ...

    def read(self, name: str) -> Tensor: ...


@runtime_checkable
class SliceSource(TensorSource, Protocol):
    """A source that can read a part of a tensor."""

    def shape_of(self, name: str) -> tuple[int, ...]: ...

    def read_part(self, name: str, dim: int, start: int, end: int) -> Tensor:
        """Indices ``start .. end-1`` of dimension ``dim`` (0 or 1)."""
        ...


class WeightReader:
    """Reads weights once each and remembers what was read, so that nothing in a file is silently unused.

    Args:
        source: where they are.
        dense_dtype: the type that fp8 matrices are dequantised to.
    """

    def __init__(self, source: TensorSource, dense_dtype: torch.dtype = torch.float32) -> None:
        self._source = source
        self._dense_dtype = dense_dtype
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

        Which of the forms a checkpoint stores it in (:mod:`backend.model.quant`,
        :mod:`backend.model.stored_forms`) is told by the tensors that are there.

        Raises:
            ModelLoadError: when it is missing or has another shape or type.
        """
        present = self._source.names
        if f"{name}_packed" in present:
            is_int4 = f"{name}_shape" in present
            return self._int4(name, rows, columns) if is_int4 else self._blocks(name, rows, columns)
        if f"{name}_scale_inv" in present:
            return self._fp8(name, rows, columns)
        tensor = self._take(name)
        self._check_shape(name, tuple(tensor.shape), (rows, columns))
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise UnsupportedModelError(
                f"{self._source.place_of(name)}: weights of type {tensor.dtype} are not supported"
            )
        return tensor

    def ignore(self, prefix: str) -> int:
        """Leave out every tensor under ``prefix`` (parts that are not run); returns how many there are."""
        kept = {name for name in self._unread if not name.startswith(prefix)}
        num_ignored = len(self._unread) - len(kept)
        self._unread = kept
        return num_ignored

    def finish(self) -> None:
        """Refuse a checkpoint with tensors that nothing read: it computes something that this engine would
        not.

        Raises:
            UnsupportedModelError: naming one such tensor.
        """
        left = sorted(name for name in self._unread if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise UnsupportedModelError(
                f"{self._source.place_of(left[0])}: not a tensor of this architecture"
                f" ({len(left)} such in all)"
            )

    def _blocks(self, name: str, rows: int, columns: int) -> AffineBlocks:
        packed, scale, minimum = (self._take(name + suffix) for suffix in _SUFFIXES)
        groups = (rows, columns // GROUP_SIZE)
        self._check_shape(f"{name}_scale", tuple(scale.shape), groups)
        self._check_shape(f"{name}_min", tuple(minimum.shape), groups)
        self._check_type(f"{name}_packed", packed, torch.uint8)
        is_four_bit = tuple(packed.shape) == (rows, columns // 2)
        self._check_shape(
            f"{name}_packed", tuple(packed.shape), (rows, columns // 2 if is_four_bit else columns)
        )
        return AffineBlocks(packed, scale, minimum)

    def _int4(self, name: str, rows: int, columns: int) -> AffineBlocks:
        words, scale, shape = (self._take(name + suffix) for suffix in ("_packed", "_scale", "_shape"))
        if columns % GROUP_SIZE:
            place = self._source.place_of(f"{name}_packed")
            raise ModelLoadError(f"{place}: {columns} columns are no multiple of {GROUP_SIZE}")
        if shape.tolist() != [rows, columns]:
            raise ModelLoadError(
                f"{self._source.place_of(f'{name}_shape')}: {shape.tolist()} must be {[rows, columns]}"
            )
        self._check_type(f"{name}_packed", words, torch.int32)
        self._check_shape(f"{name}_packed", tuple(words.shape), (rows, -(-columns // _WORD_COLUMNS)))
        self._check_shape(f"{name}_scale", tuple(scale.shape), (rows, columns // GROUP_SIZE))
        return blocks_of_int4(words, scale)

    def _fp8(self, name: str, rows: int, columns: int) -> Tensor:
        weight, scale = self._take(name), self._take(f"{name}_scale_inv")
        self._check_type(name, weight, torch.float8_e4m3fn)
        self._check_shape(name, tuple(weight.shape), (rows, columns))
        blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        self._check_shape(f"{name}_scale_inv", tuple(scale.shape), blocks)
        return dequantise_fp8(weight, scale, self._dense_dtype)

    def _check_type(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        if tensor.dtype != dtype:
            raise ModelLoadError(f"{self._source.place_of(name)}: type {tensor.dtype} must be {dtype}")

    def _take(self, name: str) -> Tensor:
        if name not in self._source.names:
            raise ModelLoadError(f"{self._source.place_of(name)}: missing")
        self._unread.discard(name)
        return self._source.read(name)

    def _check_shape(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise ModelLoadError(
                f"{self._source.place_of(name)}: shape {list(shape)} must be {list(expected)}"
            )
