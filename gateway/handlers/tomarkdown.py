"""``tomarkdown`` over REST and ``env.AI.toMarkdown`` over the binding: files in, Markdown out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec
from aiohttp import BodyPartReader, web

from gateway.auth import Authenticator
from gateway.config import MarkdownConfig
from gateway.edge.admission import BodyBudget
from gateway.edge.aiohttp_exchange import BodiesFullError
from gateway.errors import Refusal, bad_input, too_large
from gateway.handlers.enveloped import enveloped
from gateway.markdown.converter import ConversionError, Converter
from gateway.markdown.formats import SUPPORTED, kind_of
from gateway.multipart import form_parts, read_piece
from gateway.wire.openai import explain_decoding

_FILE_FIELDS = ("file", "files")
_MAX_OTHER_FIELDS = 16
_MAX_OPTION_BYTES = 64 * 1024
_BYTES_PER_TOKEN = 4


class _Document(msgspec.Struct, frozen=True, rename="camel"):
    """``data`` is base64 on the wire."""

    name: str
    data: bytes
    mime_type: str = ""


class _OutputOptions(msgspec.Struct, frozen=True):
    format: str = "markdown"


class _HtmlOptions(msgspec.Struct, frozen=True, rename="camel"):
    hostname: str = ""
    css_selector: str = ""


class _ConversionOptions(msgspec.Struct, frozen=True):
    """What of ``conversionOptions`` counts here; the rest concerns images, which stay as they are."""

    output: _OutputOptions = _OutputOptions()
    html: _HtmlOptions = _HtmlOptions()


class _BindingOptions(msgspec.Struct, frozen=True, rename="camel"):
    conversion_options: _ConversionOptions = _ConversionOptions()


class _BindingBody(msgspec.Struct, frozen=True):
    files: list[_Document]
    options: _BindingOptions | None = None


class _Converted(msgspec.Struct, frozen=True, rename="camel"):
    id: str
    name: str
    mime_type: str
    tokens: int
    data: str
    format: str = "markdown"


class _Failed(msgspec.Struct, frozen=True, rename="camel"):
    id: str
    name: str
    mime_type: str
    error: str
    format: str = "error"


class MarkdownRoutes:
    """Converts for callers who may run models. ``bodies`` is shared with all other requests."""

    def __init__(
        self,
        authenticator: Authenticator,
        converter: Converter,
        config: MarkdownConfig,
        bodies: BodyBudget,
        *,
        max_body_bytes: int,
    ) -> None:
        self._authenticator = authenticator
        self._converter = converter
        self._config = config
        self._bodies = bodies
        self._max_body_bytes = max_body_bytes

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_post("/client/v4/accounts/{account_id}/ai/tomarkdown", self.convert)
        router.add_get("/client/v4/accounts/{account_id}/ai/tomarkdown/supported", self.supported)
        router.add_post("/to-everything/markdown/transformer", self.convert)
        router.add_get("/to-everything/markdown/supported", self.supported)

    async def supported(self, request: web.Request) -> web.Response:
        """The declared list. Raises Refusal."""
        await self._admit(request)
        return enveloped(SUPPORTED)

    async def convert(self, request: web.Request) -> web.Response:
        """Every file of the request, in order; one that fails does not fail the others. Raises Refusal."""
        await self._admit(request)
        length = request.content_length
        num_bytes = self._max_body_bytes if length is None else min(length, self._max_body_bytes)
        if not self._bodies.take(num_bytes):
            raise BodiesFullError
        try:
            if request.content_type == "multipart/form-data":
                documents, options = await self._read_form(request)
            else:
                documents, options = await self._read_json(request)
            self._check(documents, options)
            return enveloped([await self._convert_one(each, options) for each in documents])
        finally:
            self._bodies.give_back(num_bytes)

    async def _admit(self, request: web.Request) -> None:
        account_id = request.match_info.get("account_id", request.headers.get("x-cf-account-id", ""))
        await self._authenticator.authenticate(request.headers.get("authorization"), account_id)

    async def _read_json(self, request: web.Request) -> tuple[list[_Document], _ConversionOptions]:
        raw = await request.read()
        try:
            body = await asyncio.to_thread(msgspec.json.decode, raw, type=_BindingBody)
        except msgspec.ValidationError as error:
            raise explain_decoding(error) from error
        except msgspec.DecodeError as error:
            raise bad_input("/", "the body must be multipart/form-data, or JSON with 'files'") from error
        options = body.options or _BindingOptions()
        return body.files, options.conversion_options

    async def _read_form(self, request: web.Request) -> tuple[list[_Document], _ConversionOptions]:
        documents: list[_Document] = []
        options = _ConversionOptions()
        async for part in form_parts(request, max_parts=self._config.max_files + _MAX_OTHER_FIELDS):
            if part.name == "conversionOptions":
                options = _options_of(await _read_part(part, _MAX_OPTION_BYTES))
            elif part.name in _FILE_FIELDS or part.filename:
                documents.append(await self._read_file(part, len(documents)))
        return documents, options

    async def _read_file(self, part: BodyPartReader, num_before: int) -> _Document:
        if num_before >= self._config.max_files:
            raise _too_many(self._config.max_files)
        data = await _read_part(part, self._config.max_file_bytes)
        return _Document(part.filename or "", data, part.headers.get("content-type", ""))

    def _check(self, documents: Sequence[_Document], options: _ConversionOptions) -> None:
        if not documents:
            raise bad_input("/files", "at least one file is required")
        if len(documents) > self._config.max_files:
            raise _too_many(self._config.max_files)
        for document in documents:
            if len(document.data) > self._config.max_file_bytes:
                raise too_large(self._config.max_file_bytes)
        if options.output.format != "markdown":
            raise bad_input("/conversionOptions/output/format", "must be 'markdown'")

    async def _convert_one(self, document: _Document, options: _ConversionOptions) -> Any:
        identity = (str(uuid4()), document.name, document.mime_type)
        kind = kind_of(document.name, document.mime_type)
        if kind is None:
            extensions = ", ".join(each.extension for each in SUPPORTED)
            return _Failed(*identity, f"this kind of file is not supported; supported are {extensions}")
        hostname = options.html.hostname
        base_url = hostname if not hostname or "://" in hostname else f"https://{hostname}"
        try:
            markdown = await self._converter.convert(
                kind, document.data, base_url=base_url, css_selector=options.html.css_selector
            )
        except ConversionError as error:
            return _Failed(*identity, f"the file cannot be converted: {error}")
        num_tokens = -(-len(markdown.encode()) // _BYTES_PER_TOKEN)
        return _Converted(*identity, num_tokens, markdown)


async def _read_part(part: BodyPartReader, max_bytes: int) -> bytes:
    """Raises Refusal: it is larger."""
    data = bytearray()
    while chunk := await read_piece(part):
        data += chunk
        if len(data) > max_bytes:
            raise too_large(max_bytes)
    try:
        return bytes(part.decode(bytes(data)))
    except (ValueError, RuntimeError) as error:  # a transfer encoding that it does not have
        raise bad_input("/", "a part is not in the encoding that its headers name") from error


def _options_of(raw: bytes) -> _ConversionOptions:
    try:
        return msgspec.json.decode(raw, type=_ConversionOptions)
    except msgspec.DecodeError as error:
        raise bad_input("/conversionOptions", "must be a JSON object of conversion options") from error


def _too_many(max_files: int) -> Refusal:
    return bad_input("/files", f"at most {max_files} files can be converted at once")
