"""Documents to Markdown: what each kind becomes, and what a hostile one cannot do."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from gateway.config import MarkdownConfig
from gateway.errors import Reason, Refusal
from gateway.markdown.conversion import UnreadableError, convert
from gateway.markdown.converter import ConversionError, Converter
from gateway.markdown.formats import SUPPORTED, Kind, kind_of
from tests.support.documents import docx_file, pdf_file, xlsx_file, zip_file

HTML = b"""<html><head><title>Lists</title><script>alert(1)</script></head>
<body><h2>Head</h2><p>A <a href="/x">link</a> and <b>bold</b>.</p><ul><li>one</li></ul>
<table><tr><th>a</th></tr><tr><td>1</td></tr></table></body></html>"""
BILLION_LAUGHS = (
    '<?xml version="1.0"?><!DOCTYPE w [<!ENTITY a0 "ha">'
    + "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 10))
    + "]><w:document>&a9;</w:document>"
)


@pytest.mark.parametrize(
    ("name", "mime_type", "kind"),
    [
        ("a.pdf", "application/pdf", "pdf"),
        ("a.PDF", "", "pdf"),
        ("a.csv", "application/octet-stream", "csv"),
        ("a.csv", "text/plain", "csv"),
        ("a", "text/html; charset=utf-8", "html"),
        ("a.pdf", "text/html", "html"),
        ("a", "", None),
        ("a.exe", "application/octet-stream", None),
        ("a.png", "image/png", None),
        ("pdf", "", None),
    ],
)
def test_kinds_go_by_type_then_by_name(name: str, mime_type: str, kind: Kind | None) -> None:
    assert kind_of(name, mime_type) == kind


def test_everything_declared_is_recognized() -> None:
    for each in SUPPORTED:
        assert kind_of(f"x{each.extension}", "") is not None
        assert kind_of("x", each.mime_type) is not None


def test_html() -> None:
    markdown = convert("html", HTML, base_url="https://example.com/dir/")
    assert "## Head" in markdown
    assert "[link](https://example.com/x) and **bold**" in markdown
    assert "- one" in markdown
    assert "| a |" in markdown
    assert "alert" not in markdown
    assert convert("html", HTML, css_selector="p").startswith("A [link](/x)")
    assert convert("html", HTML, css_selector="nav") == "\n"


def test_pdf() -> None:
    assert convert("pdf", pdf_file("Hello from page one", "Report")) == "# Report\n\nHello from page one\n"


def test_docx() -> None:
    assert convert("docx", docx_file("Heading", "Some text.")) == "# Heading\n\nSome text.\n"


def test_xlsx() -> None:
    markdown = convert("xlsx", xlsx_file([["item", "price"], ["a|b", 1.5], [None, None], ["c", None]]))
    assert markdown == "## Prices\n\n| item | price |\n| --- | --- |\n| a\\|b | 1.5 |\n| c |  |\n"


def test_csv_and_text() -> None:
    assert convert("csv", b"a;b\r\n1;2\r\n") == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
    assert convert("csv", 'a,b\n1,"x\ny"\n'.encode("utf-16")) == "| a | b |\n| --- | --- |\n| 1 | x y |\n"
    assert convert("csv", b"") == "\n"
    assert convert("text", b"\xef\xbb\xbf# As it is\n\n\n\nText") == "# As it is\n\nText\n"


@pytest.mark.parametrize("kind", ["pdf", "docx", "xlsx", "csv", "html", "text"])
def test_rubbish_is_told_from_documents(kind: Kind) -> None:
    with pytest.raises(UnreadableError):
        convert(kind, b"\xff\xd8\xff\xe0 rubbish \x00\x80")


@pytest.mark.parametrize("kind", ["docx", "xlsx"])
def test_an_archive_of_something_else_is_no_document(kind: Kind) -> None:
    with pytest.raises(UnreadableError):
        convert(kind, zip_file({"a.txt": "hello"}))


def test_a_bad_selector_is_named() -> None:
    with pytest.raises(UnreadableError, match="cssSelector"):
        convert("html", HTML, css_selector="p[")


@pytest.mark.slow
class TestConverter:
    """Starts processes."""

    @staticmethod
    def converter(**changes: float) -> Converter:
        return Converter(msgspec.structs.replace(MarkdownConfig(), **changes))

    async def test_a_document_is_converted_in_a_process_of_its_own(self) -> None:
        markdown = await self.converter().convert("html", HTML, css_selector="h2")
        assert markdown == "## Head\n"

    async def test_a_damaged_one_says_so(self) -> None:
        with pytest.raises(ConversionError, match="not a PDF"):
            await self.converter().convert("pdf", b"rubbish")

    async def test_too_slow_a_one_is_ended(self) -> None:
        started = time.monotonic()
        with pytest.raises(ConversionError, match=r"longer than 0\.05 s"):
            await self.converter(timeout_s=0.05).convert("text", b"x")
        assert time.monotonic() - started < 5

    async def test_too_much_output_is_refused(self) -> None:
        with pytest.raises(ConversionError, match="larger than 10 bytes"):
            await self.converter(max_output_bytes=10).convert("text", b"x" * 100)

    async def test_a_bomb_harms_only_its_own_process(self) -> None:
        bomb = docx_file("x" * 400_000_000)
        assert len(bomb) < 1_000_000
        with pytest.raises(ConversionError):
            await self.converter(max_memory_mib=256).convert("docx", bomb)
        laughs = zip_file({"[Content_Types].xml": BILLION_LAUGHS, "word/document.xml": BILLION_LAUGHS})
        with pytest.raises(ConversionError):
            await self.converter(max_memory_mib=256, timeout_s=10).convert("docx", laughs)

    async def test_only_so_many_wait_and_only_so_long(self) -> None:
        converter = self.converter(max_concurrent=1, max_waiting=1, wait_s=0.05)
        results = await asyncio.gather(
            *(converter.convert("text", b"x") for _ in range(3)), return_exceptions=True
        )
        reasons = [each.reason for each in results if isinstance(each, Refusal)]
        assert results[0] == "x\n"
        assert reasons == [Reason.CAPACITY] * 2
