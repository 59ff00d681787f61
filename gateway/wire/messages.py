"""What a message may be: roles, contents of text and images, tool calls of the past.

Messages stay plain data, because the chat template reads them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.errors import bad_input

_ROLES = frozenset(("developer", "system", "user", "assistant", "tool", "function"))
_ROLES_WITH_OPTIONAL_CONTENT = frozenset(("assistant", "tool", "function"))
_DETAILS = ("auto", "low", "high")
_OTHER_MEDIA = {
    "video_url": "video",
    "video": "video",
    "input_video": "video",
    "input_audio": "audio",
    "audio": "audio",
    "file": "files",
    "input_file": "files",
}


def check_message(index: int, message: dict[str, Any]) -> None:
    """Check message ``index`` of a request.

    Raises:
        Refusal: 400, naming the one wrong field.
    """
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_input(f"/messages/{index}/role", f"must be one of {', '.join(sorted(_ROLES))}")
    content = message.get("content")
    if isinstance(content, list):
        check_parts(f"/messages/{index}/content", content)
    elif content is None:
        if role not in _ROLES_WITH_OPTIONAL_CONTENT:
            raise bad_input(f"/messages/{index}/content", f"is required for role {role}")
    elif not isinstance(content, str):
        raise bad_input(f"/messages/{index}/content", "must be a string, an array of parts, or null")
    if message.get("tool_calls"):
        _check_tool_calls(f"/messages/{index}/tool_calls", message["tool_calls"])


def check_parts(pointer: str, parts: Sequence[Any]) -> None:
    """Check the parts of one message's content.

    Raises:
        Refusal: 400, naming the one wrong field.
    """
    for index, part in enumerate(parts):
        if not isinstance(part, dict):
            raise bad_input(f"{pointer}/{index}", "must be an object with a type")
        kind = part.get("type")
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise bad_input(f"{pointer}/{index}/text", "must be a string")
        elif kind == "image_url":
            _check_image(f"{pointer}/{index}/image_url", part.get("image_url"))
        elif kind != "refusal":
            raise bad_input(f"{pointer}/{index}/type", _why_not(kind))


def _check_image(pointer: str, holder: Any) -> None:
    if isinstance(holder, str):  # as older clients send it
        return
    if not isinstance(holder, dict):
        raise bad_input(pointer, "must be an object with a url")
    if not isinstance(holder.get("url"), str):
        raise bad_input(f"{pointer}/url", "must be a string")
    if holder.get("detail") not in (None, *_DETAILS):
        raise bad_input(f"{pointer}/detail", f"must be one of {', '.join(_DETAILS)}")


def _why_not(kind: Any) -> str:
    medium = _OTHER_MEDIA.get(kind) if isinstance(kind, str) else None
    if medium is not None:
        return f"no model here takes {medium}, only 'text' and 'image_url' parts"
    return "must be 'text' or 'image_url'"


def _check_tool_calls(pointer: str, calls: Any) -> None:
    if not isinstance(calls, list):
        raise bad_input(pointer, "must be an array")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_input(f"{pointer}/{index}/function/name", "must be a string")
        if not isinstance(function.get("arguments"), str | dict | None):
            raise bad_input(f"{pointer}/{index}/function/arguments", "must be a JSON object in a string")
