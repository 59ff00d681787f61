"""Whether the model thinks before it answers, in all the spellings that clients have for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend.text.messages import BadMessageError


@dataclass(frozen=True, slots=True)
class Thinking:
    """``is_on``: the answer begins with reasoning. ``keeps_history``: reasoning of all past turns is shown
    to the model again, not only that of the running tool loop.
    """

    is_on: bool = True
    keeps_history: bool = False


def read_thinking(options: Mapping[str, Any], setting: Any = None) -> Thinking:
    """Read a request's options; any one that says off is enough.

    Args:
        options: ``chat_template_kwargs``, with the request's ``reasoning_effort`` among them.
        setting: the request's own ``thinking``: ``{"type": "enabled" | "disabled", "keep": "all" | None}``.

    Raises:
        BadMessageError: naming the option with a wrong value.
    """
    is_on = options.get("reasoning_effort") != "none"
    keeps_history = _flag(options, "preserve_thinking") is True or _flag(options, "clear_thinking") is False
    is_on = is_on and _flag(options, "enable_thinking") is not False
    for path, value in (("thinking", setting), ("chat_template_kwargs.thinking", options.get("thinking"))):
        found = _setting(value, path)
        is_on = is_on and found.is_on
        keeps_history = keeps_history or found.keeps_history
    return Thinking(is_on, keeps_history)


def _setting(value: Any, path: str) -> Thinking:
    if value is None or isinstance(value, bool):
        return Thinking(is_on=value is not False)
    if not isinstance(value, Mapping):
        raise BadMessageError(path, "must be true, false or an object with a type")
    kind = value.get("type")
    if kind not in (None, "enabled", "disabled"):
        raise BadMessageError(f"{path}.type", "must be 'enabled' or 'disabled'")
    keep = value.get("keep")
    if keep not in (None, "all"):
        raise BadMessageError(f"{path}.keep", "must be 'all' or null")
    return Thinking(kind != "disabled", keep == "all")


def _flag(options: Mapping[str, Any], name: str) -> bool | None:
    value = options.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadMessageError(f"chat_template_kwargs.{name}", "must be true or false")
    return value
