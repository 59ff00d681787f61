"""The language model's tensors under one set of names, whatever else a checkpoint holds."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from backend.model.errors import ModelLoadError
from backend.model.tensor_names import plain_name
from backend.model.weights import SliceSource


class TextTensors:
    """Names without the ``language_model.`` that models with a vision tower put before them; see
    :func:`backend.model.tensor_names.plain_name`.

    Raises:
        ModelLoadError: when two tensors become the same one.
    """

    def __init__(self, source: SliceSource) -> None:
        self._source = source
        self._stored: dict[str, str] = {}
        for stored in source.names:
            name = plain_name(stored)
            if name in self._stored:
                raise ModelLoadError(f"{source.place_of(stored)}: is the same tensor as {self._stored[name]}")
            self._stored[name] = stored

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    def place_of(self, name: str) -> str:
        return self._source.place_of(self._stored.get(name, name))

    def read(self, name: str) -> Tensor:
        return self._source.read(self._stored[name])

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._source.shape_of(self._stored[name])

    def read_part(self, name: str, dim: int, start: int, end: int) -> Tensor:
        return self._source.read_part(self._stored[name], dim, start, end)
