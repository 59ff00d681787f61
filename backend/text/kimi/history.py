"""A conversation as clients send it, brought to the form that the prompt is written from.

What clients leave out, null, or spell in an older way means the same here: one field for reasoning, native
ids of calls, contents as lists of pieces, and no message that could print a Python value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from backend.text.kimi.call_ids import CallIdRenamer
from backend.text.messages import BadMessageError

_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_IMAGE_PARTS: Final = frozenset({"image", "image_url", "input_image"})
_VIDEO_PARTS: Final = frozenset({"video", "video_url"})
_OTHER_PARTS: Final = {"input_audio": "audio", "file": "files"}

MediaKind = Literal["image", "video"]


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image or a video among a message's contents; ``part`` is as the client sent it."""

    kind: MediaKind
    part: Mapping[str, Any]
    path: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of the past: its native id and its arguments as JSON text."""

    id: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. ``answers`` is the native id of the call whose result a tool's message is."""

    role: str
    name: str
    content: Sequence[str | MediaPart]
    reasoning: str = ""
    calls: Sequence[Call] = field(default=())
    answers: str = ""


def read_history(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Read OpenAI-form messages; they are left as they were.

    Raises:
        BadMessageError: naming the one field that is of a wrong form.
    """
    if not messages:
        raise BadMessageError("messages", "must hold at least one message")
    renamer = CallIdRenamer()
    return [_turn(message, f"messages[{index}]", renamer) for index, message in enumerate(messages)]


def _turn(message: Mapping[str, Any], path: str, renamer: CallIdRenamer) -> Turn:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadMessageError(f"{path}.role", f"must be one of {', '.join(sorted(_ROLES))}")
    role = {"developer": "system", "function": "tool"}.get(role, role)
    content = _content(message.get("content"), f"{path}.content")
    name = _text(message, "name", path)
    if role == "assistant":
        reasoning = _text(message, "reasoning_content", path) or _text(message, "reasoning", path)
        return Turn(role, name or role, content, reasoning, _calls(message, path, renamer))
    if role == "tool":
        answers = renamer.name_result(_text(message, "tool_call_id", path), name)
        return Turn(role, name or role, content, answers=answers)
    return Turn(role, name or role, content)


def _calls(message: Mapping[str, Any], path: str, renamer: CallIdRenamer) -> list[Call]:
    calls = message.get("tool_calls") or ()
    if not calls and message.get("function_call"):  # the older way to say it, for one call without an id
        calls = ({"function": message["function_call"]},)
    if not isinstance(calls, list | tuple):
        raise BadMessageError(f"{path}.tool_calls", "must be a list")
    if calls:
        renamer.begin_turn()
    return [_call(call, f"{path}.tool_calls[{index}]", renamer) for index, call in enumerate(calls)]


def _call(call: Any, path: str, renamer: CallIdRenamer) -> Call:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise BadMessageError(f"{path}.function", "must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadMessageError(f"{path}.function.name", "must be a string")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = "{}"
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Call(renamer.name_call(_text(call, "id", path), name), arguments)


def _text(holder: Mapping[str, Any], name: str, path: str) -> str:
    value = holder.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadMessageError(f"{path}.{name}", "must be a string")
    return value


def _content(content: Any, path: str) -> list[str | MediaPart]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return [_part(part, f"{path}[{index}]") for index, part in enumerate(content)]
    raise BadMessageError(path, "must be a string, a list of parts, or null")


def _part(part: Any, path: str) -> str | MediaPart:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise BadMessageError(path, "must be an object with a type")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise BadMessageError(f"{path}.type", "must be a string")
    if kind in _IMAGE_PARTS:
        return MediaPart("image", part, path)
    if kind in _VIDEO_PARTS:
        return MediaPart("video", part, path)
    if kind in _OTHER_PARTS:
        raise BadMessageError(path, f"this model takes no {_OTHER_PARTS[kind]} (part of type {kind!r})")
    if kind not in _TEXT_PARTS:
        raise BadMessageError(f"{path}.type", "must be 'text' or 'image_url'")
    return _text(part, _TEXT_PARTS[kind], path)
