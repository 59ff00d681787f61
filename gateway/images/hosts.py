"""The list of hosts that images may be fetched from."""

from __future__ import annotations

import re
from collections.abc import Sequence

from yarl import URL

_ENTRY = re.compile(r"(?P<any>\*\.)?(?P<host>[a-z0-9_-]+(\.[a-z0-9_-]+)*)(:(?P<port>\d{1,5}))?")
_MAX_URL_CHARS = 4096


class UrlNotAllowedError(ValueError):
    """A URL that is not fetched; the message says why, in words that can follow a colon."""


class HostList:
    """Allowed hosts: names, ``*.name`` for all below one, each with the port of its scheme or its own.

    Args:
        entries: of the configuration.
        allows_plain_http: whether ``http`` will do.

    Raises:
        ValueError: naming the entry that is of none of these forms.
    """

    def __init__(self, entries: Sequence[str], *, allows_plain_http: bool) -> None:
        self._exact: set[tuple[str, int | None]] = set()
        self._below: set[tuple[str, int | None]] = set()
        for entry in entries:
            found = _ENTRY.fullmatch(entry.lower())
            if found is None:
                raise ValueError(
                    f"gateway.images.allowed_hosts: {entry!r} must be a host such as example.com, "
                    "*.example.com or example.com:8443"
                )
            port = int(found["port"]) if found["port"] else None
            (self._below if found["any"] else self._exact).add((found["host"], port))
        self._schemes = ("https", "http") if allows_plain_http else ("https",)

    @property
    def is_empty(self) -> bool:
        return not (self._exact or self._below)

    def parse(self, text: str) -> URL:
        """A URL that may be fetched, without its fragment.

        Raises:
            UrlNotAllowedError: it is not on the list, or it is no such URL.
        """
        if self.is_empty:
            raise UrlNotAllowedError(
                "must be a data: URL (data:image/png;base64,...); images elsewhere are not fetched"
            )
        if len(text) > _MAX_URL_CHARS:
            raise UrlNotAllowedError(f"must be a data: URL, or one of at most {_MAX_URL_CHARS} characters")
        try:
            url = URL(text).with_fragment(None)
            host = (url.raw_host or "").lower().removesuffix(".")
            port = None if url.is_default_port() else url.explicit_port
        except ValueError:
            raise UrlNotAllowedError("is not a URL") from None
        if url.scheme not in self._schemes:
            raise UrlNotAllowedError(f"must be a data: URL, or one of {' or '.join(self._schemes)}")
        if url.user is not None or url.password is not None:
            raise UrlNotAllowedError("must not hold a user or a password")
        if not self._names(host, port):
            raise UrlNotAllowedError("names a host that images are not fetched from")
        return url

    def _names(self, host: str, port: int | None) -> bool:
        if (host, port) in self._exact:
            return True
        labels = host.split(".")
        return any((".".join(labels[start:]), port) in self._below for start in range(1, len(labels)))
