"""Multipart bodies, whose faults are the client's: a refusal, never an error of ours."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.errors import bad_input

_FAULTS = (ValueError, AssertionError, LookupError, HttpProcessingError, web.RequestPayloadError)
"""What aiohttp's reader raises at bodies that are no form, are cut off, or have broken headers."""


async def form_parts(request: web.Request, *, max_parts: int) -> AsyncIterator[BodyPartReader]:
    """The parts of a ``multipart/form-data`` body in order, ``max_parts`` at most; further ones are not read.

    Read a part with :func:`read_piece` before going on to the next.

    Raises:
        Refusal: the body is not such a form, is broken, or nests forms.
    """
    with _blamed_on_the_client():
        form = await request.multipart()
    for _ in range(max_parts):
        with _blamed_on_the_client():
            part = await form.next()
        if part is None:
            return
        if not isinstance(part, BodyPartReader):
            raise bad_input("/", "multipart forms do not nest here")
        yield part


async def read_piece(part: BodyPartReader, max_bytes: int = 64 * 1024) -> bytes:
    """The next bytes of a part, empty at its end. Raises Refusal when the body is broken."""
    with _blamed_on_the_client():
        return await part.read_chunk(max_bytes)


@contextlib.contextmanager
def _blamed_on_the_client() -> Iterator[None]:
    try:
        yield
    except _FAULTS as error:
        raise bad_input("/", "the body is not a whole multipart form") from error
