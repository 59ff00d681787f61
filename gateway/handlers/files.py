"""``/v1/files``: upload input files of batches, read their output."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from aiohttp import BodyPartReader, web

from billing.accounts import Principal
from gateway.auth import Authenticator
from gateway.batches.config import BatchesConfig
from gateway.batches.files import FileStore, StoredFile, Upload
from gateway.batches.native import queue_full
from gateway.batches.openai import INPUT_PURPOSE, file_object, list_object
from gateway.batches.queue import QueueFullError
from gateway.errors import bad_input, no_route, too_large
from gateway.handlers.v1_pages import json_answer, page_size, storing
from gateway.multipart import form_parts, read_piece

_MAX_PAGE = 1_000
_PAGE = 100
_PIECE_BYTES = 1024 * 1024
_MAX_FIELD_BYTES = 4_096
_MAX_FIELDS = 16
_MAX_NAME_CHARS = 255


class FileRoutes:
    """Handlers of the aiohttp application."""

    def __init__(self, authenticator: Authenticator, files: FileStore, config: BatchesConfig) -> None:
        self._authenticator = authenticator
        self._files = files
        self._config = config

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes, below an account and below the API token's own."""
        router.add_post("/client/v4/accounts/{account_id}/ai/v1/files", self.upload)
        router.add_get("/client/v4/accounts/{account_id}/ai/v1/files", self.list)
        router.add_get("/client/v4/accounts/{account_id}/ai/v1/files/{file_id}", self.show)
        router.add_get("/client/v4/accounts/{account_id}/ai/v1/files/{file_id}/content", self.content)
        router.add_delete("/client/v4/accounts/{account_id}/ai/v1/files/{file_id}", self.delete)
        router.add_post("/v1/files", self.upload)
        router.add_get("/v1/files", self.list)
        router.add_get("/v1/files/{file_id}", self.show)
        router.add_get("/v1/files/{file_id}/content", self.content)
        router.add_delete("/v1/files/{file_id}", self.delete)

    async def upload(self, request: web.Request) -> web.Response:
        """Take a file in, piece by piece."""
        principal = await self._principal(request)
        if not request.content_type.startswith("multipart/form-data"):
            raise bad_input("content-type", "must be multipart/form-data")
        upload = self._files.begin_upload()
        is_kept = False
        try:
            purpose, name = await self._receive(request, upload)
            if purpose != INPUT_PURPOSE:
                raise bad_input("purpose", f"must be {INPUT_PURPOSE!r}")
            with storing():
                stored = await asyncio.to_thread(
                    self._files.finish_upload, upload, principal.account_id, purpose, name
                )
            is_kept = True
        except QueueFullError as error:
            raise queue_full(error) from error
        finally:
            if not is_kept and upload.num_bytes:
                with storing():
                    await asyncio.to_thread(upload.discard)
        return json_answer(file_object(stored))

    async def show(self, request: web.Request) -> web.Response:
        """One file."""
        return json_answer(file_object(await self._find(request)))

    async def list(self, request: web.Request) -> web.Response:
        """A page of the account's files, newest first."""
        principal = await self._principal(request)
        size = page_size(request, default=_PAGE, maximum=_MAX_PAGE)
        with storing():
            found = await asyncio.to_thread(
                self._files.newest,
                principal.account_id,
                purpose=request.query.get("purpose", ""),
                after=request.query.get("after", ""),
                max_files=size + 1,
            )
        shown = [file_object(stored) for stored in found[:size]]
        return json_answer(list_object(shown, has_more=len(found) > size))

    async def content(self, request: web.Request) -> web.StreamResponse:
        """The file's bytes."""
        stored = await self._find(request)
        pieces = self._files.content(stored)
        with storing():
            piece = await asyncio.to_thread(_join, pieces)
        response = web.StreamResponse(headers={"content-type": "application/octet-stream"})
        response.content_length = stored.num_bytes
        await response.prepare(request)
        while piece:
            await response.write(piece)
            piece = await asyncio.to_thread(_join, pieces)
        await response.write_eof()
        return response

    async def delete(self, request: web.Request) -> web.Response:
        """Delete one file."""
        stored = await self._find(request)
        with storing():
            await asyncio.to_thread(self._files.delete, stored.account_id, stored.id)
        return json_answer({"id": stored.id, "object": "file", "deleted": True})

    async def _receive(self, request: web.Request, upload: Upload) -> tuple[str, str]:
        """Read the form: the file's bytes go to ``upload``; returns its purpose and name."""
        purpose, name = "", ""
        async for part in form_parts(request, max_parts=_MAX_FIELDS):
            if part.name == "file":
                name = (part.filename or "file")[:_MAX_NAME_CHARS]
                await self._store(part, upload)
            elif part.name == "purpose":
                purpose = (await read_piece(part, _MAX_FIELD_BYTES)).decode("utf-8", "replace")
        if not name:
            raise bad_input("file", "is required")
        return purpose, name

    async def _store(self, part: BodyPartReader, upload: Upload) -> None:
        piece = bytearray()
        while data := await read_piece(part):
            piece += data
            if len(piece) >= _PIECE_BYTES:
                await self._add(upload, piece)
                piece = bytearray()
        await self._add(upload, piece)

    async def _add(self, upload: Upload, piece: bytearray) -> None:
        with storing():
            await asyncio.to_thread(upload.add, bytes(piece))
        if upload.is_too_large:
            raise too_large(self._config.max_file_bytes)

    async def _principal(self, request: web.Request) -> Principal:
        return await self._authenticator.authenticate(
            request.headers.get("authorization"), request.match_info.get("account_id", "")
        )

    async def _find(self, request: web.Request) -> StoredFile:
        principal = await self._principal(request)
        with storing():
            stored = await asyncio.to_thread(
                self._files.find, principal.account_id, request.match_info["file_id"]
            )
        if stored is None:
            raise no_route(request.path)
        return stored


def _join(pieces: Iterator[bytes]) -> bytes:
    """Pieces up to a moderate size; empty at the end."""
    joined = bytearray()
    for piece in pieces:
        joined += piece
        if len(joined) >= _PIECE_BYTES:
            break
    return bytes(joined)
