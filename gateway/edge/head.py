"""Request heads in, response heads out: the text part of HTTP/1.1."""

from __future__ import annotations

import re
from http import HTTPStatus

import httptools

from gateway.edge.exchange import Headers

_COMMON_NAMES = (
    "accept accept-encoding accept-language authorization cache-control cf-aig-metadata connection "
    "content-length content-type cookie expect host origin referer traceparent tracestate transfer-encoding "
    "user-agent x-forwarded-for x-request-id x-session-affinity"
)
_NAMES = {
    spelling.encode(): name
    for name in _COMMON_NAMES.split()
    for spelling in (name, name.title(), name.capitalize())
}
"""Lower-case names of headers by their usual spellings."""

_TLS_HANDSHAKE = b"\x16\x03"
_ABSOLUTE = re.compile(rb"https?://[^/?#]*(?=/)", re.IGNORECASE)
_STATUS_LINES = {int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n" for status in HTTPStatus}


class BadHeadError(ValueError):
    """The bytes are not a request that we serve; ``status`` is what to answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestHead:
    """The parsed head of one request.

    ``content_length`` is 0 when there is no body and -1 when the body is chunked. ``keep_alive`` says whether
    the client wants to go on using the connection.
    """

    __slots__ = ("content_length", "headers", "is_http_1_0", "keep_alive", "method", "path", "query", "url")

    def __init__(self) -> None:
        self.url = b""
        self.method = ""
        self.path = ""
        self.query = ""
        self.headers: dict[str, str] = {}
        self.content_length = 0
        self.is_http_1_0 = False
        self.keep_alive = True

    def on_url(self, url: bytes) -> None:
        """Called by the parser."""
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser. Latin-1 keeps every byte and can always be encoded again."""
        key = _NAMES.get(name) or name.decode("latin-1").lower()
        text = value.decode("latin-1").strip(" \t")
        headers = self.headers
        if key in headers:
            text = f"{headers[key]}, {text}"
        headers[key] = text


def parse_head(data: bytes) -> RequestHead:
    """Parse ``data``, which ends with the empty line after the headers.

    The strictness against request smuggling is llhttp's: a head with both Content-Length and
    Transfer-Encoding, two Content-Lengths, folded headers, lone line breaks or spaces before a colon is
    refused.

    Raises:
        BadHeadError: malformed, or a version or coding that we do not speak.
    """
    head = RequestHead()
    parser = httptools.HttpRequestParser(head)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise BadHeadError(400, f"malformed request: {error}") from None
    version = parser.get_http_version()
    if version == "1.0":
        head.is_http_1_0 = True
    elif version != "1.1":
        raise BadHeadError(505, f"HTTP/{version} is not supported")
    head.method = parser.get_method().decode("latin-1")
    head.keep_alive = _wants_keep_alive(head)
    url = head.url
    if url[:1] != b"/":
        url = _ABSOLUTE.sub(b"", url)
    path, _, query = url.partition(b"?")
    head.path = path.decode("latin-1")
    head.query = query.decode("latin-1")
    _check_host(head)
    _read_framing(head)
    return head


def problem_of_beginning(data: bytes) -> str:
    """Why these bytes will never become the head of a request, or "" when they may.

    So that who speaks something else is told at once, instead of both sides waiting for the other.
    """
    if data.startswith(_TLS_HANDSHAKE):
        return "this port speaks plain HTTP, not TLS: use http://, or put a TLS terminator in front of it"
    begun = data.lstrip(b"\r\n")
    if begun and not begun[:1].isalpha():
        return "malformed request: it does not begin with a method"
    if b"\n\n" in begun:
        return "malformed request: lines must end in CR LF"
    return ""


def _check_host(head: RequestHead) -> None:
    """RFC 9112, section 3.2: HTTP/1.1 requests have exactly one Host. Two are joined with a comma by now."""
    host = head.headers.get("host")
    if host is None and not head.is_http_1_0:
        raise BadHeadError(400, "malformed request: there is no Host header")
    if host is not None and "," in host:
        raise BadHeadError(400, "malformed request: there are several Host headers")


def _wants_keep_alive(head: RequestHead) -> bool:
    connection = head.headers.get("connection")
    if connection is None:
        return not head.is_http_1_0
    options = [option.strip() for option in connection.lower().split(",")]
    return "keep-alive" in options if head.is_http_1_0 else "close" not in options


def _read_framing(head: RequestHead) -> None:
    headers = head.headers
    length = headers.get("content-length")
    if length is not None:
        head.content_length = int(length)
    coding = headers.get("transfer-encoding")
    if coding is not None:
        if coding.lower() != "chunked" or head.is_http_1_0:
            raise BadHeadError(400, f"transfer-encoding {coding!r} is not supported")
        head.content_length = -1


def response_head(status: int, headers: Headers, framing: str) -> bytes:
    """Build a response head; ``framing`` is the transport's own header lines, each with its line break.

    Raises:
        ValueError: a header holds a line break or a character outside of Latin-1.
    """
    block = "".join([f"{name}: {value}\r\n" for name, value in headers])
    if block.count("\n") != len(headers) or block.count("\r") != len(headers):
        raise ValueError("a response header holds a line break")
    line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
    return f"{line}{block}{framing}\r\n".encode("latin-1")
