"""What a model takes and gives, as JSON schemas: inputs are read off the very types that decode them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from gateway.config import EMBEDDINGS_TASK, ServedModel
from gateway.wire.embeddings import NativeBody
from gateway.wire.openai import ChatBody

_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": ["string", "null"]}
_USAGE = {
    "type": "object",
    "properties": {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": _COUNT}},
        "completion_tokens_details": {"type": "object", "properties": {"reasoning_tokens": _COUNT}},
        "neurons": {"type": "number", "minimum": 0},
    },
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
}
_TOOL_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
            "required": ["name", "arguments"],
        },
    },
    "required": ["id", "type", "function"],
}
_CHOICE = {
    "type": "object",
    "properties": {
        "index": _COUNT,
        "message": {
            "type": "object",
            "properties": {
                "role": {"const": "assistant"},
                "content": _TEXT,
                "reasoning_content": _TEXT,
                "reasoning": _TEXT,
                "tool_calls": {"type": ["array", "null"], "items": _TOOL_CALL},
            },
            "required": ["role", "content"],
        },
        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
        "logprobs": {"type": ["object", "null"]},
    },
    "required": ["index", "message", "finish_reason"],
}
_COMPLETION = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "chat.completion"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": _CHOICE},
        "usage": _USAGE,
    },
    "required": ["id", "object", "created", "model", "choices", "usage"],
}
_STREAM = {"type": "string", "contentType": "text/event-stream", "format": "binary"}
_VECTORS = {
    "type": "object",
    "properties": {
        "shape": {"type": "array", "items": _COUNT},
        "data": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "pooling": {"type": "string"},
        "usage": _USAGE,
    },
    "required": ["shape", "data"],
}


@lru_cache
def _input_schema(body: type[msgspec.Struct]) -> dict[str, Any]:
    """The schema of a body, without the fields that are kept raw to be refused or passed on."""
    fields = [
        (field.name, field.type, field.default)
        for field in msgspec.structs.fields(body)
        if field.type is not msgspec.Raw
    ]
    return msgspec.json.schema(msgspec.defstruct(body.__name__, fields, kw_only=True))


def schemas_of(model: ServedModel) -> dict[str, Any]:
    """``input`` and ``output`` of a model on ``/ai/run``."""
    if model.task == EMBEDDINGS_TASK:
        return {"input": _input_schema(NativeBody), "output": _VECTORS}
    return {"input": _input_schema(ChatBody), "output": {"oneOf": [_COMPLETION, _STREAM]}}
