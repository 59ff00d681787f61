"""Messages in the many forms that clients send, brought to the one form that chat templates read.

After :func:`normalise_messages` a message has a known ``role`` and a string ``content``; a null is as good as
absent, so that no template can print "None" or a list's Python form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_MEDIA: Final = {
    "image_url": "images",
    "image": "images",
    "input_image": "images",
    "video_url": "video",
    "input_audio": "audio",
    "file": "files",
}


class BadMessageError(ValueError):
    """A message cannot be rendered; ``param`` is the path of the one wrong field, ``code`` for programs."""

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(f"{param}: {message}")
        self.param = param
        self.code = code


def normalise_messages(
    messages: Sequence[Mapping[str, Any]], *, developer_role: str = "system"
) -> list[dict[str, Any]]:
    """Bring messages to the form that templates read; the input is left as it was.

    Args:
        messages: OpenAI-form messages, as received.
        developer_role: what the template calls the role ``developer``.

    Raises:
        BadMessageError: naming the field, when a role is unknown or content is of a form that the model
            cannot take.
    """
    if not messages:
        raise BadMessageError("messages", "must hold at least one message")
    return [
        _normalise(message, f"messages[{index}]", developer_role) for index, message in enumerate(messages)
    ]


def _normalise(message: Mapping[str, Any], path: str, developer_role: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(sorted(_ROLES))
        raise BadMessageError(f"{path}.role", f"must be one of {known}")
    # An empty list of tool calls is no tool calls: templates only ask whether the key is there.
    kept = {
        name: value
        for name, value in message.items()
        if value is not None and not (name == "tool_calls" and not value)
    }
    kept["role"] = developer_role if role == "developer" else role
    kept["content"] = _flatten(message.get("content"), f"{path}.content")
    return kept


def _flatten(content: Any, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part_text(part, f"{path}[{index}]") for index, part in enumerate(content))
    raise BadMessageError(path, "must be a string, a list of parts, or null")


def _part_text(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise BadMessageError(path, "must be an object with a type")
    kind = part.get("type")
    if isinstance(kind, str) and kind in _MEDIA:
        raise BadMessageError(path, f"this model takes text only, no {_MEDIA[kind]} (part of type {kind!r})")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise BadMessageError(f"{path}.type", "must be 'text'")
    if text is None:
        return ""
    if not isinstance(text, str):
        raise BadMessageError(f"{path}.text", "must be a string")
    return text
