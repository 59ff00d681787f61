"""The process of one conversion: ``python -m gateway.markdown.child``, the document on standard input.

It takes less than it may before it looks at the document, writes Markdown to standard output, and ends with
:data:`OK`, or with the reason on standard error and :data:`UNREADABLE` or :data:`TOO_MUCH`.
"""

from __future__ import annotations

import resource
import sys

import msgspec

from gateway.markdown.conversion import UnreadableError, convert
from gateway.markdown.formats import Kind

OK, UNREADABLE, TOO_MUCH = 0, 3, 4


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is to do; its one argument, as JSON."""

    kind: Kind
    max_memory_bytes: int
    max_cpu_s: int
    max_output_bytes: int
    base_url: str = ""
    css_selector: str = ""


def main(argument: str) -> int:
    """Convert standard input as ordered; returns the exit code."""
    order = msgspec.json.decode(argument, type=Order)
    _limit(resource.RLIMIT_AS, order.max_memory_bytes)
    _limit(resource.RLIMIT_CPU, order.max_cpu_s)
    _limit(resource.RLIMIT_FSIZE, 0)
    data = sys.stdin.buffer.read()
    try:
        markdown = convert(order.kind, data, base_url=order.base_url, css_selector=order.css_selector)
    except UnreadableError as error:
        return _end(str(error), UNREADABLE)
    except (MemoryError, RecursionError):
        return _end("it needs more memory than a conversion may take", TOO_MUCH)
    encoded = markdown.encode("utf-8", "replace")
    if len(encoded) > order.max_output_bytes:
        return _end(f"its Markdown is larger than {order.max_output_bytes} bytes", TOO_MUCH)
    sys.stdout.buffer.write(encoded)
    return OK


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(what, (value, hard))


def _end(reason: str, code: int) -> int:
    sys.stderr.write(reason)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
