"""What the routes of files and batches have in common: pages, JSON answers, a database that is away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from aiohttp import web

from billing.store import StoreError
from gateway.batches.native import batches_unavailable
from gateway.errors import bad_input


@contextmanager
def storing() -> Iterator[None]:
    """Make a refusal of a database that does not answer."""
    try:
        yield
    except StoreError as error:
        raise batches_unavailable() from error


def json_answer(value: Any) -> web.Response:
    """200 with a bare JSON object."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def page_size(request: web.Request, *, default: int, maximum: int) -> int:
    """``limit`` of the query; pages are newest first, and no other order is offered.

    Raises:
        Refusal: 400, naming the parameter.
    """
    if request.query.get("order", "desc") != "desc":
        raise bad_input("order", "must be desc")
    text = request.query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= maximum):
        raise bad_input("limit", f"must be a number between 1 and {maximum}")
    return int(text)
