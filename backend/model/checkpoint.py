"""A model directory: ``config.json`` and one or more safetensors files."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from backend.model.errors import ModelLoadError
from backend.model.headers import INDEX, SINGLE, read_object


class SafetensorsCheckpoint:
    """The tensors of a directory; shards are memory-mapped when their first tensor is read.

    Raises:
        ModelLoadError: when a file is missing or is not what its name says.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: tuple[str, Any] | None = None
        index = directory / INDEX
        if index.is_file():
            self._files = self._read_index(index)
        elif (directory / SINGLE).is_file():
            self._files = dict.fromkeys(self._shard(SINGLE).keys(), SINGLE)
        else:
            raise ModelLoadError(f"{directory}: neither {SINGLE} nor {INDEX} is there")

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def place_of(self, name: str) -> str:
        file = self._directory / self._files[name] if name in self._files else self._directory
        return f"{file}: {name}"

    def read(self, name: str) -> Tensor:
        shard = self._shard(self._files[name])
        try:
            tensor: Tensor = shard.get_tensor(name)
        except SafetensorError as error:
            raise ModelLoadError(f"{self.place_of(name)}: {error}") from error
        return tensor

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return tuple(self._shard(self._files[name]).get_slice(name).get_shape())

    def read_part(self, name: str, dim: int, start: int, end: int) -> Tensor:
        """Indices ``start .. end-1`` of a tensor's dimension ``dim`` (0 or 1); the rest is not read."""
        part = self._shard(self._files[name]).get_slice(name)
        try:
            tensor: Tensor = part[start:end] if dim == 0 else part[:, start:end]
        except SafetensorError as error:
            raise ModelLoadError(f"{self.place_of(name)}: {error}") from error
        return tensor

    def _shard(self, file: str) -> Any:
        # One shard is open at a time: families read layer by layer, and shards hold whole layers.
        if self._open is None or self._open[0] != file:
            path = self._directory / file
            try:
                self._open = (file, safe_open(str(path), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{path}: not a readable safetensors file: {error}") from error
        return self._open[1]

    def _read_index(self, index: Path) -> dict[str, str]:
        files = read_object(index).get("weight_map")
        if not isinstance(files, dict):
            raise ModelLoadError(f"{index}: weight_map: missing")
        for file in sorted(set(files.values())):
            if Path(file).name != file:
                raise ModelLoadError(f"{index}: weight_map: {file!r} is not a file name")
            if not (self._directory / file).is_file():
                raise ModelLoadError(f"{self._directory / file}: missing shard (named by {INDEX})")
            present = set(self._shard(file).keys())
            absent = sorted(name for name, place in files.items() if place == file and name not in present)
            if absent:
                raise ModelLoadError(f"{self._directory / file}: {absent[0]}: missing (named by {INDEX})")
        return files
