"""Submissions as clients send them: the ``requests`` of Workers AI, and OpenAI's files of lines.

What is wrong with a single request is found out when it runs, and fails that request alone. What cannot be a
batch at all is refused, or for a file reported line by line.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from gateway.batches.jobs import NewItem, Problem
from gateway.errors import Refusal, bad_input

MAX_PROBLEMS = 20
MAX_REFERENCE_BYTES = 1_024

_NULL = msgspec.Raw(b"null")


class NativeBody(msgspec.Struct, frozen=True):
    """The members of a native body that make it a submission or a poll, as encoded JSON."""

    requests: msgspec.Raw = _NULL
    request_id: msgspec.Raw = _NULL
    model: Any = None

    @property
    def is_submission(self) -> bool:
        return bytes(self.requests) != b"null"

    @property
    def is_poll(self) -> bool:
        return bytes(self.request_id) != b"null"


class _Reference(msgspec.Struct, frozen=True):
    external_reference: msgspec.Raw = _NULL


class _Line(msgspec.Struct, frozen=True):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Body(msgspec.Struct, frozen=True):
    model: str


_native_decoder = msgspec.json.Decoder(NativeBody)
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_reference_decoder = msgspec.json.Decoder(_Reference)
_line_decoder = msgspec.json.Decoder(_Line)
_body_decoder = msgspec.json.Decoder(_Body)
_BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_native(body: bytes) -> NativeBody | None:
    """None when the body is no JSON object."""
    try:
        return _native_decoder.decode(body)
    except _BAD_JSON:
        return None


def native_items(body: NativeBody, max_items: int) -> list[NewItem]:
    """The items of a submission. Raises Refusal: 400, when there is no list of them or too long a one."""
    if not body.is_submission:
        raise bad_input("/requests", "is required with queueRequest")
    try:
        raws = _list_decoder.decode(body.requests)
    except _BAD_JSON:
        raise bad_input("/requests", "must be an array of requests") from None
    if not 1 <= len(raws) <= max_items:
        raise bad_input("/requests", f"must hold between 1 and {max_items} requests")
    return [NewItem(body=bytes(raw), reference=_reference_of(raw, number)) for number, raw in enumerate(raws)]


def _reference_of(raw: msgspec.Raw, number: int) -> bytes:
    """The client's own name for an item, any JSON value. Raises Refusal: it is too long."""
    try:
        reference = bytes(_reference_decoder.decode(raw).external_reference)
        reference.decode()
    except _BAD_JSON:
        return b"null"
    if len(reference) > MAX_REFERENCE_BYTES:
        where = f"/requests/{number}/external_reference"
        raise bad_input(where, f"must be at most {MAX_REFERENCE_BYTES} bytes of JSON")
    return reference


class LineReader:
    """Reads a file of lines into items, and collects what is wrong with it.

    ``model`` is what all requests name; a file has one.
    """

    def __init__(self, endpoint: str, max_items: int) -> None:
        self._endpoint = endpoint
        self._max_items = max_items
        self._seen: set[str] = set()
        self.items: list[NewItem] = []
        self.problems: list[Problem] = []
        self.model = ""

    def read(self, pieces: Iterable[bytes]) -> None:
        """Read the whole file, as far as it makes sense to."""
        for number, line in enumerate(_lines(pieces), 1):
            if number == 1:
                line = line.removeprefix(BOM_UTF8)  # editors on Windows leave one
            if line.strip():
                self._read_line(number, line)
            if len(self.items) > self._max_items:
                message = f"a batch has at most {self._max_items} requests"
                self.problems = [Problem(code="too_many_requests", message=message, line=number)]
                break
            if len(self.problems) >= MAX_PROBLEMS:
                break
        if not self.items and not self.problems:
            self.problems.append(Problem(code="empty_file", message="the input file holds no requests"))

    def _read_line(self, number: int, line: bytes) -> None:
        try:
            request = _line_decoder.decode(line)
            model = _body_decoder.decode(request.body).model
        except msgspec.ValidationError as error:
            self._report("invalid_request", f"{error}".replace("`", ""), number)
            return
        except _BAD_JSON:
            self._report("invalid_json_line", "this line is not a JSON object", number)
            return
        if len(request.custom_id.encode("utf-8", "surrogatepass")) > MAX_REFERENCE_BYTES:
            self._report(
                "invalid_request", f"is longer than {MAX_REFERENCE_BYTES} bytes", number, "custom_id"
            )
        elif request.custom_id in self._seen:
            self._report("duplicate_custom_id", "an earlier line has the same custom_id", number, "custom_id")
        elif request.method != "POST":
            self._report("invalid_method", "must be POST", number, "method")
        elif request.url != self._endpoint:
            self._report("mismatched_url", f"must be the batch's endpoint {self._endpoint}", number, "url")
        elif self.model not in ("", model):
            self._report(
                "mismatched_model", f"the file's first line asks for {self.model}", number, "body.model"
            )
        else:
            self.model = model
            self._seen.add(request.custom_id)
            reference = msgspec.json.encode(request.custom_id)
            self.items.append(NewItem(body=bytes(request.body), reference=reference))

    def _report(self, code: str, message: str, line: int, param: str | None = None) -> None:
        self.problems.append(Problem(code=code, message=message, line=line, param=param))


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


def no_file(file_id: str) -> Refusal:
    """The input file that was named does not exist, or is of another account."""
    return bad_input("/input_file_id", f"there is no file {file_id[:100]}")
