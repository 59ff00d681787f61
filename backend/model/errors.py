"""What can be wrong with a model on disk."""

from __future__ import annotations


class ModelLoadError(ValueError):
    """A model cannot be loaded; the message names the file and the tensor or field."""


class UnsupportedModelError(ModelLoadError):
    """The model is well-formed but needs something that this engine does not do."""
