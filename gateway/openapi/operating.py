"""Health and metrics, the binding's further routes, Markdown, and this document."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.openapi.parts import ACCOUNT, BODY_REFUSALS, JSON, Content, Operation, answers

_PLAIN = Content(("text/plain",), {"type": "string"})
_FILES = Content(
    ("multipart/form-data",),
    {
        "type": "object",
        "properties": {"files": {"type": "array", "items": {"type": "string", "format": "binary"}}},
    },
)
_BINDING_FILES = Content(
    (JSON,), {"type": "object", "properties": {"files": {"type": "array"}, "options": {"type": "object"}}}
)
_ANY_OBJECT = Content((JSON,), {"type": "object"})


def operations() -> Iterator[Operation]:
    """Described once, in the order of the documentation."""
    yield from _open_ones()
    yield from _markdown()
    yield from _ai_gateway()


def _open_ones() -> Iterator[Operation]:
    for path, summary, answer, refusals in (
        ("/health", "200 while the process answers.", answers("status"), ()),
        ("/ready", "200 while requests can be served.", answers("status", "replicas"), ()),
        ("/metrics", "Prometheus text.", _PLAIN, ()),
        ("/openapi.json", "This document.", answers("openapi", "paths"), ()),
    ):
        yield Operation(
            path=path,
            method="get",
            summary=summary,
            tag="operations",
            answer=answer,
            refusals=refusals,
            is_open=True,
        )


def _markdown() -> Iterator[Operation]:
    for path, body in (
        (f"{ACCOUNT}/ai/tomarkdown", _FILES),
        ("/to-everything/markdown/transformer", _BINDING_FILES),
    ):
        yield Operation(
            path=path,
            method="post",
            summary="Files to Markdown.",
            tag="markdown",
            body=body,
            answer=answers("result", "success"),
            refusals=BODY_REFUSALS,
        )
    for path in (f"{ACCOUNT}/ai/tomarkdown/supported", "/to-everything/markdown/supported"):
        yield Operation(
            path=path,
            method="get",
            summary="Which kinds of files.",
            tag="markdown",
            answer=answers("result", "success"),
        )


def _ai_gateway() -> Iterator[Operation]:
    base = "/ai-gateway/gateways/{gateway_id}"
    yield Operation(
        path=f"{base}/url/{{provider}}",
        method="get",
        summary="A base URL for clients.",
        tag="binding",
        answer=answers(),
    )
    yield Operation(
        path=f"{base}/logs/{{log_id}}",
        method="get",
        summary="What is known of a request.",
        tag="binding",
        answer=answers(),
    )
    yield Operation(
        path=f"{base}/logs/{{log_id}}",
        method="patch",
        summary="Refused: logs are not kept, the ledger is not changed.",
        tag="binding",
        body=_ANY_OBJECT,
        answer=answers(),
        refusals=BODY_REFUSALS,
    )
    yield Operation(
        path="/ai-gateway/universal/run/{gateway_id}",
        method="post",
        summary="Refused: there are no other providers.",
        tag="binding",
        body=_ANY_OBJECT,
        answer=answers(),
        refusals=BODY_REFUSALS,
    )
