"""The language model's tensors under one set of names, whatever else a checkpoint holds."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from backend.model.errors import ModelLoadError
from backend.model.weights import TensorSource

_PREFIX = "language_model."


class TextTensors:
    """Names without the ``language_model.`` that models with a vision tower put before them.

    ``language_model.model.layers.0`` and the variant ``language_model.layers.0`` both become
    ``model.layers.0``; ``language_model.lm_head`` becomes ``lm_head``. Other names stay.

    Raises:
        ModelLoadError: when two tensors become the same one.
    """

    def __init__(self, source: TensorSource) -> None:
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


def plain_name(stored: str) -> str:
    """The name of a tensor in a checkpoint that is a language model and nothing else."""
    if not stored.startswith(_PREFIX):
        return stored
    inner = stored.removeprefix(_PREFIX)
    return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"
