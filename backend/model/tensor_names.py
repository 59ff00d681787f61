"""The names of a language model's tensors, however a checkpoint prefixes them."""

from __future__ import annotations

_PREFIX = "language_model."


def plain_name(stored: str) -> str:
    """The name of a tensor in a checkpoint that is a language model and nothing else.

    ``language_model.model.layers.0`` and the variant ``language_model.layers.0`` both become
    ``model.layers.0``; ``language_model.lm_head`` becomes ``lm_head``. Other names stay.
    """
    if not stored.startswith(_PREFIX):
        return stored
    inner = stored.removeprefix(_PREFIX)
    return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"
