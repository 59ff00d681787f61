"""The routes that only tell: catalog, identity, usage, receipts, analytics."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.openapi.parts import ACCOUNT, BODY_REFUSALS, ENVELOPE, JSON, Content, Operation, answers

_PAGE = ("page", "per_page")
_MODELS = (
    *_PAGE,
    "task",
    "author",
    "source",
    "search",
    "hide_experimental",
    "include_deprecated",
    "format",
)

_ENVELOPED: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (f"{ACCOUNT}/ai/models/schema", "catalog", "What a model takes and gives.", ("model",)),
    (f"{ACCOUNT}/ai/tasks/search", "catalog", "What the models are for.", ()),
    (f"{ACCOUNT}/ai/authors/search", "catalog", "Whose models there are.", ()),
    (f"{ACCOUNT}/ai/finetunes", "catalog", "None: nothing can be fine-tuned here.", ()),
    (f"{ACCOUNT}/ai/finetunes/public", "catalog", "None.", ()),
    ("/client/v4/user/tokens/verify", "identity", "Whether a token is valid.", ()),
    (f"{ACCOUNT}/tokens/verify", "identity", "Whether a token of the account is valid.", ()),
    ("/client/v4/user", "identity", "403: tokens belong to accounts.", ()),
    ("/client/v4/accounts", "identity", "The token's account, as a list.", _PAGE),
    (ACCOUNT, "identity", "The account.", ()),
    ("/client/v4/memberships", "identity", "The token's account, as a membership.", _PAGE),
    (
        f"{ACCOUNT}/ai/usage",
        "usage",
        "What was used and what it costs.",
        ("since", "until", "group_by", "limit", "cursor", "model", "session", "token", "status", "order"),
    ),
    (
        f"{ACCOUNT}/ai/savings",
        "usage",
        "What usage cost, what caching saved, and what other price lists ask for it.",
        ("since", "until", "model", "session", "token", "surface", "batch"),
    ),
)

_GRAPHQL = Content(
    (JSON,),
    {
        "type": "object",
        "required": ["query"],
        "properties": {
            "query": {"type": "string"},
            "variables": {"type": ["object", "null"]},
            "operationName": {"type": ["string", "null"]},
        },
    },
)


def operations() -> Iterator[Operation]:
    """Described once, in the order of the documentation."""
    for path, tag, summary, query in _ENVELOPED:
        yield Operation(path=path, method="get", summary=summary, tag=tag, query=query, answer=ENVELOPE)
    for path in (f"{ACCOUNT}/ai/models/search", "/ai-api/models/search"):
        yield Operation(
            path=path, method="get", summary="The catalog.", tag="catalog", query=_MODELS, answer=answers()
        )
    for path in (f"{ACCOUNT}/ai/v1/models", "/v1/models"):
        yield Operation(
            path=path,
            method="get",
            summary="The catalog, OpenAI form.",
            tag="catalog",
            answer=answers("object", "data"),
        )
    yield Operation(
        path=f"{ACCOUNT}/ai/usage/{{request_id}}",
        method="get",
        summary="The signed receipt of one request.",
        tag="usage",
        answer=answers(),
    )
    yield Operation(
        path="/.well-known/jwks.json",
        method="get",
        summary="The keys that receipts are verified with.",
        tag="usage",
        answer=answers("keys"),
        is_open=True,
        refusals=(),
    )
    yield Operation(
        path="/client/v4/graphql",
        method="post",
        summary="Analytics in GraphQL.",
        tag="usage",
        body=_GRAPHQL,
        answer=answers(),
        refusals=BODY_REFUSALS,
        refusal_schema="GraphQLRefusal",
    )
