"""Input items of the Responses form as chat messages.

Consecutive items of the assistant (its reasoning, what it said, the calls that it made) are one message, as
chat templates want them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.errors import bad_input

_TEXT_PARTS = frozenset(("input_text", "output_text", "text"))


class Conversation(msgspec.Struct):
    """``pointers`` say of each message which item of the input it came from, later ones first."""

    messages: list[dict[str, Any]] = []
    pointers: list[tuple[str, str]] = []

    def add(self, message: dict[str, Any], source: str) -> None:
        self.pointers.insert(0, (f"/messages/{len(self.messages)}", source))
        self.messages.append(message)


def read_input(instructions: str | None, given: str | list[dict[str, Any]]) -> Conversation:
    """Raises Refusal: 400, naming the item that is wrong."""
    conversation = Conversation()
    if instructions is not None:
        conversation.add({"role": "system", "content": instructions}, "/instructions")
    if isinstance(given, str):
        conversation.add({"role": "user", "content": given}, "/input")
        return conversation
    if not given:
        raise bad_input("/input", "must hold at least one item")
    for index, item in enumerate(given):
        _read_item(conversation, item, f"/input/{index}")
    return conversation


def _read_item(conversation: Conversation, item: dict[str, Any], pointer: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        _read_message(conversation, item, pointer)
    elif kind == "function_call":
        _read_call(conversation, item, pointer)
    elif kind == "function_call_output":
        _read_output(conversation, item, pointer)
    elif kind == "reasoning":
        message = _assistant(conversation, pointer, starts_new=True)
        message["reasoning_content"] = _reasoning_text(item, pointer)
    elif kind == "item_reference":
        raise bad_input(f"{pointer}/type", "nothing is kept here that could be referred to: send the item")
    else:
        raise bad_input(
            f"{pointer}/type", "must be message, function_call, function_call_output or reasoning"
        )


def _read_message(conversation: Conversation, item: dict[str, Any], pointer: str) -> None:
    role, content = item.get("role"), item.get("content")
    if isinstance(content, list):
        content = [_part(part, f"{pointer}/content/{index}") for index, part in enumerate(content)]
    if role != "assistant":
        conversation.add({"role": role, "content": content}, pointer)
        return
    message = _assistant(conversation, pointer, starts_new=False)
    if message.get("content") is not None or message.get("tool_calls"):
        message = _assistant(conversation, pointer, starts_new=True)
    message["content"] = content


def _read_call(conversation: Conversation, item: dict[str, Any], pointer: str) -> None:
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise bad_input(f"{pointer}/{name}", "must be a string")
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    _assistant(conversation, pointer, starts_new=False).setdefault("tool_calls", []).append(call)


def _read_output(conversation: Conversation, item: dict[str, Any], pointer: str) -> None:
    if not isinstance(item.get("call_id"), str):
        raise bad_input(f"{pointer}/call_id", "must be a string")
    output = item.get("output")
    if isinstance(output, list):
        output = [_part(part, f"{pointer}/output/{index}") for index, part in enumerate(output)]
    elif not isinstance(output, str):
        raise bad_input(f"{pointer}/output", "must be a string or an array of parts")
    conversation.add({"role": "tool", "tool_call_id": item["call_id"], "content": output}, pointer)


def _assistant(conversation: Conversation, pointer: str, *, starts_new: bool) -> dict[str, Any]:
    """The assistant's message that goes on here, or a new one."""
    if conversation.messages and not starts_new:
        last = conversation.messages[-1]
        if last["role"] == "assistant":
            return last
    message: dict[str, Any] = {"role": "assistant", "content": None}
    conversation.add(message, pointer)
    return message


def _reasoning_text(item: dict[str, Any], pointer: str) -> str:
    """What was thought: the text itself where it is given, else its summary."""
    texts: list[str] = []
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise bad_input(f"{pointer}/{name}", "must be an array")
        texts += [part["text"] for part in parts if isinstance(part, dict) and "text" in part]
        if not all(isinstance(text, str) for text in texts):
            raise bad_input(f"{pointer}/{name}", "must hold texts")
        if texts:
            break
    return "".join(texts)


def _part(part: Any, pointer: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": part.get("text")}
    if kind == "refusal":
        return {"type": "refusal", "refusal": part.get("refusal")}
    if kind == "input_image":
        if not isinstance(part.get("image_url"), str):
            raise bad_input(f"{pointer}/image_url", "must be a string; files are not kept here")
        image = {"url": part["image_url"], "detail": part.get("detail") or "auto"}
        return {"type": "image_url", "image_url": image}
    raise bad_input(f"{pointer}/type", "must be input_text, output_text, input_image or refusal")
