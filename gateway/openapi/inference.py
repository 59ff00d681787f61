"""The routes that run models: native, OpenAI's below an account and alone, and the binding's."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gateway.openapi.parts import (
    ACCOUNT,
    BODY_REFUSALS,
    ENVELOPE,
    EVENT_STREAM,
    JSON,
    Content,
    Operation,
    answers,
    documented,
)
from gateway.wire.completions import CompletionsBody
from gateway.wire.embeddings import OpenAIBody as EmbeddingsBody
from gateway.wire.openai import ChatBody
from gateway.wire.responses import ResponsesBody

_AFFINITY = ("x-session-affinity",)


CHAT = documented(ChatBody, "ChatCompletionRequest")
COMPLETION = documented(CompletionsBody, "CompletionRequest")
EMBEDDINGS = documented(EmbeddingsBody, "EmbeddingsRequest")
RESPONSES = documented(ResponsesBody, "ResponsesRequest")


def _streaming(*required: str) -> Content:
    whole = answers(*required)
    return Content((JSON, EVENT_STREAM), whole.schema)


_V1: tuple[tuple[str, str, type[msgspec.Struct], Content], ...] = (
    (
        "chat/completions",
        "A chat completion.",
        CHAT,
        _streaming("id", "object", "created", "model", "choices", "usage"),
    ),
    (
        "completions",
        "A legacy completion.",
        COMPLETION,
        _streaming("id", "object", "created", "model", "choices", "usage"),
    ),
    ("embeddings", "Vectors of texts.", EMBEDDINGS, answers("object", "data", "model", "usage")),
    (
        "responses",
        "A response; nothing is stored.",
        RESPONSES,
        _streaming("id", "object", "created_at", "model", "output", "status", "usage"),
    ),
)

_BINDING_BODY = Content(
    (JSON,),
    {
        "type": "object",
        "required": ["inputs"],
        "properties": {"inputs": {"type": "object"}, "options": {"type": "object"}},
    },
)


def operations() -> Iterator[Operation]:
    """Described once, in the order of the documentation."""
    native = Content((JSON, EVENT_STREAM), ENVELOPE.schema)
    for path, summary in (
        (f"{ACCOUNT}/ai/run/{{model}}", "Run a model, native form; with queueRequest=true as a batch."),
        (f"{ACCOUNT}/ai/run", "Run the model that the body names."),
    ):
        yield Operation(
            path=path,
            method="post",
            summary=summary,
            tag="inference",
            body=CHAT,
            query=("queueRequest",),
            headers=_AFFINITY,
            answer=native,
            refusals=BODY_REFUSALS,
        )
    for name, summary, body, answer in _V1:
        for prefix, refusal in ((f"{ACCOUNT}/ai/v1", "AnyRefusal"), ("/v1", "AnyRefusal")):
            yield Operation(
                path=f"{prefix}/{name}",
                method="post",
                summary=summary,
                tag="openai",
                body=body,
                headers=_AFFINITY,
                answer=answer,
                refusals=BODY_REFUSALS,
                refusal_schema=refusal,
            )
    for path in ("/run", "/ai-gateway/run"):
        yield Operation(
            path=path,
            method="post",
            summary="What env.AI.run of a Worker sends.",
            tag="binding",
            body=_BINDING_BODY,
            headers=("cf-consn-model-id", *_AFFINITY),
            answer=_streaming(),
            refusals=BODY_REFUSALS,
            refusal_schema="AnyRefusal",
        )
