"""``tool_choice`` of type ``allowed_tools``: some of the tools may be called, as if there were no others."""

from __future__ import annotations

from typing import Any

from gateway.errors import bad_input

_POINTER = "/tool_choice/allowed_tools"


def narrowed(choice: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The tools that may be called, and the plain choice among them: ``auto`` or ``required``.

    Raises:
        Refusal: 400, naming what is wrong with the choice.
    """
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict):
        raise bad_input(_POINTER, "must be an object")
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        raise bad_input(f"{_POINTER}/mode", "must be 'auto' or 'required'")
    wanted = allowed.get("tools")
    if not isinstance(wanted, list) or not wanted:
        raise bad_input(f"{_POINTER}/tools", "must hold at least one tool")
    by_name = {_name_of(tool): tool for tool in tools}
    for index, tool in enumerate(wanted):
        if _name_of(tool) not in by_name:
            raise bad_input(f"{_POINTER}/tools/{index}", "is none of the tools")
    names = {_name_of(tool) for tool in wanted}
    return [tool for name, tool in by_name.items() if name in names], mode


def _name_of(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
