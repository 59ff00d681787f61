"""Puts parts together: paths, parameters, bodies, refusals, and the schemas that they refer to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gateway.openapi.parts import JSON, MEANINGS, Content, Operation, Schema

_PARAMETER = re.compile(r"\{(\w+)\}")
_REFERENCE = "#/components/schemas/{name}"

_ERROR_ITEM: Schema = {
    "type": "object",
    "required": ["code", "message"],
    "properties": {"code": {"type": "integer"}, "message": {"type": "string"}},
}
_REFUSALS: dict[str, Schema] = {
    "Refusal": {
        "description": "Workers AI's error envelope.",
        "type": "object",
        "required": ["success", "errors", "messages"],
        "properties": {
            "success": {"const": False},
            "errors": {"type": "array", "items": _ERROR_ITEM, "minItems": 1},
            "messages": {"type": "array"},
        },
    },
    "OpenAIRefusal": {
        "description": "OpenAI's error object.",
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {"message": {"type": "string"}, "param": {"type": ["string", "null"]}},
            }
        },
    },
    "BindingRefusal": {
        "description": "What the runtime of a Worker makes an InferenceUpstreamError of.",
        "type": "object",
        "required": ["internalCode", "description", "errors"],
        "properties": {"errors": {"type": "array", "items": _ERROR_ITEM, "minItems": 1}},
    },
    "GraphQLRefusal": {
        "description": "Refusals of GraphQL have its own form; those of the edge are envelopes.",
        "type": "object",
        "required": ["errors"],
        "properties": {"errors": {"type": "array", "minItems": 1}},
    },
    "AnyRefusal": {
        "anyOf": [
            {"$ref": _REFERENCE.format(name=name)} for name in ("Refusal", "OpenAIRefusal", "BindingRefusal")
        ]
    },
}


def build_document(operations: Iterable[Operation]) -> dict[str, Any]:
    """The document as plain data. Raises ValueError when an operation is described twice."""
    operations = list(operations)
    bodies = {each.body for each in operations if isinstance(each.body, type)}
    ordered = sorted(bodies, key=lambda body: body.__module__ + body.__qualname__)
    references, schemas = msgspec.json.schema_components(ordered, ref_template=_REFERENCE)
    by_body = dict(zip(ordered, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        methods = paths.setdefault(each.path, {})
        if each.method in methods:
            raise ValueError(f"{each.method} {each.path} is described twice")
        reference = by_body[each.body] if isinstance(each.body, type) else None
        methods[each.method] = _operation(each, reference)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Embergate",
            "version": "1",
            "description": "A self-hosted Workers AI: native, OpenAI's and the binding's surface, and usage.",
        },
        "components": {
            "securitySchemes": {"apiToken": {"type": "http", "scheme": "bearer"}},
            "schemas": {**schemas, **_REFUSALS},
            "responses": _refusal_responses(operations),
        },
        "security": [{"apiToken": []}],
        "paths": dict(sorted(paths.items())),
    }


def _operation(operation: Operation, body_reference: Schema | None) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _operation_id(operation),
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": _responses(operation),
    }
    parameters = [*_path_parameters(operation.path), *_named("query", operation.query)]
    parameters += _named("header", operation.headers)
    if parameters:
        described["parameters"] = parameters
    if body_reference is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": body_reference}}}
    elif isinstance(operation.body, Content):
        described["requestBody"] = {"required": True, "content": _content(operation.body)}
    if operation.is_open:
        described["security"] = []
    return described


def _responses(operation: Operation) -> dict[str, Any]:
    responses: dict[str, Any] = {
        str(operation.status): {
            "description": MEANINGS[operation.status],
            "content": _content(operation.answer),
        }
    }
    for status in operation.refusals:
        name = _refusal_name(operation.refusal_schema, status)
        responses[str(status)] = {"$ref": f"#/components/responses/{name}"}
    return responses


def _refusal_name(schema: str, status: int) -> str:
    return f"{schema}{status}"


def _refusal_responses(operations: Iterable[Operation]) -> dict[str, Any]:
    """Every refusal that some operation answers with, described once."""
    wanted = {(each.refusal_schema, status) for each in operations for status in each.refusals}
    return {
        _refusal_name(schema, status): {
            "description": MEANINGS[status],
            "content": {JSON: {"schema": {"$ref": _REFERENCE.format(name=schema)}}},
        }
        for schema, status in sorted(wanted)
    }


def _content(content: Content) -> dict[str, Any]:
    """Only JSON has a schema worth checking; a stream's frames are described in prose."""
    return {
        media_type: {"schema": content.schema if media_type == JSON else {"type": "string"}}
        if media_type != "multipart/form-data"
        else {"schema": content.schema}
        for media_type in content.types
    }


def _path_parameters(path: str) -> list[dict[str, Any]]:
    schema = {"type": "string", "minLength": 1}
    return [
        {"name": name, "in": "path", "required": True, "schema": schema} for name in _PARAMETER.findall(path)
    ]


def _named(place: str, names: Sequence[str]) -> list[dict[str, Any]]:
    return [{"name": name, "in": place, "schema": {"type": "string"}} for name in names]


def _operation_id(operation: Operation) -> str:
    words = re.sub(r"[^a-zA-Z0-9]+", "_", operation.path).strip("_")
    return f"{operation.method}_{words}"
