"""What a request demands of its answer's form: JSON, a JSON schema, tool calls, strict tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend.http.errors import bad_request, unsupported
from backend.text.answer_rules import AnswerRules, ContentRule, ToolRule
from backend.wire import ReplicaRequest


def read_demands(request: ReplicaRequest) -> AnswerRules:
    """Read them out of a request.

    Raises:
        ReplicaError: 400 naming the one wrong field.
    """
    choice = request.tool_choice
    tools = () if choice == "none" else tuple(_read_tools(request.tools))
    must_call = choice not in (None, "none", "auto")
    max_calls = None if request.parallel_tool_calls else 1
    if must_call and not tools:
        raise bad_request("tool_choice", "asks for a tool call, but there are no tools")
    if isinstance(choice, Mapping):
        name = _named_tool(choice)
        tools = tuple(tool for tool in tools if tool.name == name)
        max_calls = 1
        if not tools:
            raise bad_request("tool_choice.function.name", "is the name of none of the tools")
    elif choice not in (None, "none", "auto", "required"):
        raise bad_request("tool_choice", "must be 'none', 'auto', 'required' or a named function")
    rules = AnswerRules(_read_content(request.response_format), tools, must_call, max_calls)
    if request.ignore_eos and not rules.is_free:
        raise bad_request("ignore_eos", "an answer that has a form to keep to ends when it has")
    return rules


def _named_tool(choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise bad_request("tool_choice", "must be {'type': 'function', 'function': {'name': ...}}")
    return name


def _read_tools(tools: list[dict[str, Any]]) -> list[ToolRule]:
    rules: list[ToolRule] = []
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue  # declared to the model as it is, and never called
        schema = function.get("parameters")
        param = f"tools.{index}.function.parameters"
        if not isinstance(schema, Mapping | None):
            raise bad_request(param, "must be a JSON schema")
        schema = {"type": "object", "properties": {}} if schema is None else schema
        rules.append(ToolRule(function["name"], schema, bool(function.get("strict")), param))
    return rules


def _read_content(response_format: Mapping[str, Any] | None) -> ContentRule | None:
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return ContentRule({"type": "object"}, "response_format")
    if kind != "json_schema":
        raise unsupported("response_format.type", "must be 'text', 'json_object' or 'json_schema'")
    param = "response_format.json_schema"
    given = response_format.get("json_schema")
    if not isinstance(given, Mapping):
        raise bad_request(param, "must be a JSON schema, bare or as {'name': ..., 'schema': ...}")
    # No keyword of JSON Schema is called "schema": an object that has one is the wrapper of the OpenAI form.
    return ContentRule(given["schema"], f"{param}.schema") if "schema" in given else ContentRule(given, param)
