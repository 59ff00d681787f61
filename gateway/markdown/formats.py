"""Which files can be converted: the declared list, by extension and media type."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Literal

import msgspec

Kind = Literal["html", "pdf", "docx", "xlsx", "csv", "text"]

_OFFICE = "application/vnd.openxmlformats-officedocument"


class Format(msgspec.Struct, frozen=True, rename="camel"):
    """One kind of file, as ``tomarkdown/supported`` lists it."""

    extension: str
    mime_type: str


_KINDS: dict[Format, Kind] = {
    Format(".pdf", "application/pdf"): "pdf",
    Format(".html", "text/html"): "html",
    Format(".htm", "text/html"): "html",
    Format(".docx", f"{_OFFICE}.wordprocessingml.document"): "docx",
    Format(".xlsx", f"{_OFFICE}.spreadsheetml.sheet"): "xlsx",
    Format(".xlsm", "application/vnd.ms-excel.sheet.macroenabled.12"): "xlsx",
    Format(".csv", "text/csv"): "csv",
    Format(".md", "text/markdown"): "text",
    Format(".txt", "text/plain"): "text",
}
SUPPORTED: Sequence[Format] = tuple(_KINDS)

_BY_TYPE = MappingProxyType({each.mime_type: kind for each, kind in _KINDS.items()})
_BY_EXTENSION = MappingProxyType({each.extension: kind for each, kind in _KINDS.items()})
_SAYS_NOTHING = ("", "application/octet-stream", "text/plain")
"""Types that tools send when they do not know; a name's extension says more."""


def kind_of(name: str, mime_type: str) -> Kind | None:
    """The kind of a file by its type, or by its name where the type says nothing; None: not supported."""
    plain_type = mime_type.partition(";")[0].strip().lower()
    _, dot, extension = name.rpartition(".")
    by_name = _BY_EXTENSION.get(f".{extension.lower()}") if dot else None
    if plain_type in _SAYS_NOTHING and by_name is not None:
        return by_name
    return _BY_TYPE.get(plain_type)
