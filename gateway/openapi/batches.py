"""OpenAI's files and batches, below an account and alone."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.openapi.parts import ACCOUNT, BODY_REFUSALS, JSON, Content, Method, Operation, answers

_LIST = ("after", "limit", "order", "purpose")
_REFUSALS = (*BODY_REFUSALS, 409)
_UPLOAD = Content(
    ("multipart/form-data",),
    {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
    },
)
_BATCH = Content(
    (JSON,),
    {
        "type": "object",
        "required": ["input_file_id", "endpoint", "completion_window"],
        "properties": {
            "input_file_id": {"type": "string"},
            "endpoint": {"type": "string"},
            "completion_window": {"type": "string"},
            "metadata": {"type": ["object", "null"]},
        },
    },
)
_OBJECT = answers("id", "object")
_PAGE = answers("object", "data")
_LINES = Content(("application/jsonl", "application/octet-stream"), {"type": "string"})

_ROUTES: tuple[tuple[Method, str, str, Content | None, tuple[str, ...], Content], ...] = (
    ("post", "files", "Upload the input file of a batch.", _UPLOAD, (), _OBJECT),
    ("get", "files", "The account's files.", None, _LIST, _PAGE),
    ("get", "files/{file_id}", "One file.", None, (), _OBJECT),
    ("get", "files/{file_id}/content", "Its bytes.", None, (), _LINES),
    ("delete", "files/{file_id}", "Delete it.", None, (), _OBJECT),
    ("post", "batches", "Queue the lines of a file.", _BATCH, (), _OBJECT),
    ("get", "batches", "The account's batches.", None, _LIST, _PAGE),
    ("get", "batches/{batch_id}", "One batch.", None, (), _OBJECT),
    ("get", "batches/{batch_id}/events", "Its event log.", None, _LIST, answers()),
    ("post", "batches/{batch_id}/cancel", "Run no more of its requests.", None, (), _OBJECT),
)


def operations() -> Iterator[Operation]:
    """Described once, in the order of the documentation."""
    for prefix in (f"{ACCOUNT}/ai/v1", "/v1"):
        for method, path, summary, body, query, answer in _ROUTES:
            yield Operation(
                path=f"{prefix}/{path}",
                method=method,
                summary=summary,
                tag="batches",
                body=body,
                query=query,
                answer=answer,
                refusals=_REFUSALS,
                refusal_schema="AnyRefusal",
            )
