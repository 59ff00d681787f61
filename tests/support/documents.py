"""Small documents of the kinds that can be converted, byte by byte where no library writes them."""

from __future__ import annotations

import io
import zipfile

from openpyxl import Workbook

_CONTENT_TYPES = (
    '<?xml version="1.0"?><Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    '<Override PartName="/word/document.xml" ContentType="application/vnd.openxmlformats-officedocument.'
    'wordprocessingml.document.main+xml"/></Types>'
)
_RELATIONS = (
    '<?xml version="1.0"?><Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
    '<Relationship Id="r1" Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/'
    'officeDocument" Target="word/document.xml"/></Relationships>'
)


def pdf_file(text: str, title: str = "") -> bytes:
    """A PDF of one page with one line."""
    content = f"BT /F1 24 Tf 72 700 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
        b" /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%b\nendstream" % (len(content), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        f"<< /Title ({title}) >>".encode(),
    ]
    out = bytearray(b"%PDF-1.4\n")
    places = []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%b\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    out += b"trailer << /Size %d /Root 1 0 R /Info 6 0 R >>\n" % (len(objects) + 1)
    return bytes(out + b"startxref\n%d\n%%%%EOF\n" % start)


def docx_file(*paragraphs: str) -> bytes:
    """A Word document; the first paragraph is a heading."""
    name = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    heading = '<w:pPr><w:pStyle w:val="Heading1"/></w:pPr>'
    body = "".join(
        f"<w:p>{heading if not index else ''}<w:r><w:t>{text}</w:t></w:r></w:p>"
        for index, text in enumerate(paragraphs)
    )
    document = f'<?xml version="1.0"?><w:document xmlns:w="{name}"><w:body>{body}</w:body></w:document>'
    return zip_file(
        {"[Content_Types].xml": _CONTENT_TYPES, "_rels/.rels": _RELATIONS, "word/document.xml": document}
    )


def zip_file(members: dict[str, str]) -> bytes:
    """A compressed archive of texts."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return file.getvalue()


def xlsx_file(rows: list[list[object]]) -> bytes:
    """A workbook with one sheet, called Prices."""
    book = Workbook()
    sheet = book.active
    sheet.title = "Prices"
    for row in rows:
        sheet.append(row)
    file = io.BytesIO()
    book.save(file)
    return file.getvalue()
