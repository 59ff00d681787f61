"""A GraphQL request as it comes over the wire; a leaf, so that decoding one needs no GraphQL library."""

from __future__ import annotations

from typing import Any

import msgspec


class Query(msgspec.Struct, frozen=True, rename="camel"):
    """The body of a GraphQL request."""

    query: str
    variables: dict[str, Any] | None = None
    operation_name: str | None = None
