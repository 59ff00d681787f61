"""One document to Markdown: what runs inside the process that a conversion has for itself.

Libraries are imported when they are needed, because a process converts one document only.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urljoin

from gateway.markdown.formats import Kind

_BLANK_LINES = re.compile(r"\n{3,}")
_UNREADABLE_PARTS = ("script", "style", "noscript", "template", "svg")


class UnreadableError(ValueError):
    """The document is not what it says it is, or damaged. The message does not quote it."""


def convert(kind: Kind, data: bytes, *, base_url: str = "", css_selector: str = "") -> str:
    """Convert ``data``; ``base_url`` makes links of HTML absolute, ``css_selector`` picks parts of it.

    Raises:
        UnreadableError: it cannot be read.
    """
    match kind:
        case "html":
            markdown = _from_html(_decoded(data), base_url, css_selector)
        case "pdf":
            markdown = _from_pdf(data)
        case "docx":
            markdown = _from_docx(data)
        case "xlsx":
            markdown = _from_xlsx(data)
        case "csv":
            markdown = _from_csv(_decoded(data))
        case "text":
            markdown = _decoded(data)
    return _BLANK_LINES.sub("\n\n", markdown).strip() + "\n"


def _decoded(data: bytes) -> str:
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise UnreadableError("it is not text in UTF-8 or UTF-16") from error


def _from_html(text: str, base_url: str, css_selector: str) -> str:
    from bs4 import BeautifulSoup
    from markdownify import MarkdownConverter
    from soupsieve import SelectorSyntaxError

    soup = BeautifulSoup(text, "html.parser")
    for part in soup(_UNREADABLE_PARTS):
        part.decompose()
    if base_url:
        for attribute in ("href", "src"):
            for element in soup.select(f"[{attribute}]"):
                element[attribute] = urljoin(base_url, str(element[attribute]))
    try:
        parts: Sequence[Any] = soup.select(css_selector) if css_selector else [soup.body or soup]
    except SelectorSyntaxError as error:
        raise UnreadableError("conversionOptions.html.cssSelector is not a CSS selector") from error
    title = soup.title.get_text(strip=True) if soup.title and not css_selector else ""
    converter = MarkdownConverter(heading_style="ATX", bullets="-")
    blocks = [f"# {title}"] if title and not soup.find("h1") else []
    return "\n\n".join(blocks + [str(converter.convert_soup(part)).strip() for part in parts])


def _from_pdf(data: bytes) -> str:
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise UnreadableError("it is a PDF that needs a password")
        pages = [page.extract_text() for page in reader.pages]
        title = (reader.metadata and reader.metadata.title) or ""
    except (PyPdfError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        if isinstance(error, UnreadableError):
            raise
        raise UnreadableError("it is not a PDF, or damaged") from error
    blocks = [f"# {title}"] if title else []
    many = len(pages) > 1
    for number, text in enumerate(pages, 1):
        blocks += [f"## Page {number}"] if many else []
        blocks.append(text.strip())
    return "\n\n".join(blocks)


def _from_docx(data: bytes) -> str:
    import zipfile
    from xml.parsers.expat import ExpatError

    import mammoth

    try:
        html = mammoth.convert_to_html(io.BytesIO(data), convert_image=mammoth.images.img_element(_no_image))
    except (zipfile.BadZipFile, KeyError, OSError, ValueError, ExpatError) as error:
        raise UnreadableError("it is not a DOCX document, or damaged") from error
    return _from_html(html.value, "", "")


def _no_image(image: Any) -> dict[str, str]:
    return {"src": ""}


def _from_xlsx(data: bytes) -> str:
    import zipfile
    from xml.etree.ElementTree import ParseError

    from openpyxl import load_workbook
    from openpyxl.utils.exceptions import InvalidFileException

    try:
        book = load_workbook(io.BytesIO(data), read_only=True, data_only=True)
        blocks = []
        for sheet in book.worksheets:
            rows = ([_cell(value) for value in row] for row in sheet.iter_rows(values_only=True))
            blocks += [f"## {sheet.title}", _table(rows)]
    except (zipfile.BadZipFile, InvalidFileException, KeyError, ValueError, ParseError) as error:
        raise UnreadableError("it is not an XLSX workbook, or damaged") from error
    return "\n\n".join(blocks)


def _from_csv(text: str) -> str:
    try:
        dialect = csv.Sniffer().sniff(text[:4096], ",;\t|")
    except csv.Error:
        dialect = csv.excel
    try:
        return _table(csv.reader(io.StringIO(text, newline=""), dialect))
    except csv.Error as error:
        raise UnreadableError("it is not a table of separated values") from error


def _cell(value: object) -> str:
    return "" if value is None else str(value)


def _table(rows: Iterable[Sequence[str]]) -> str:
    """A table whose first row that says anything is its head."""
    filled = [row for row in rows if any(row)]
    if not filled:
        return ""
    width = max(map(len, filled))
    lines = [_line(row, width) for row in filled]
    return "\n".join([lines[0], _line(["---"] * width, width), *lines[1:]])


def _line(row: Sequence[str], width: int) -> str:
    cells = [" ".join(cell.split()).replace("|", "\\|") for cell in row]
    return f"| {' | '.join(cells + [''] * (width - len(cells)))} |"
