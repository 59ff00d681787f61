"""``tomarkdown`` over REST, and as a Worker's binding asks for it."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import aiohttp
import pytest

from tests.support.documents import pdf_file
from tests.support.gateway_harness import TOKEN, Harness

HTML = b"<h1>Head</h1><p>Text</p>"
AUTHORIZATION = {"authorization": f"Bearer {TOKEN}"}


async def upload(
    gateway: Harness, *files: tuple[str, bytes, str], field: str = "files", **options: Any
) -> Any:
    """Status and body of a multipart request."""
    form = aiohttp.FormData(default_to_multipart=True)
    if options:
        form.add_field("conversionOptions", json.dumps(options))
    for name, data, kind in files:
        form.add_field(field, io.BytesIO(data), filename=name, content_type=kind)
    url = gateway.url("/tomarkdown")
    async with gateway.session.post(url, data=form, headers=AUTHORIZATION) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("path", ["/tomarkdown/supported", "binding"])
async def test_the_supported_kinds_are_declared(gateway: Harness, path: str) -> None:
    url = gateway.root("/to-everything/markdown/supported") if path == "binding" else path
    reply = await gateway.get(url)
    assert reply.headers["content-type"] == "application/json"
    assert {"extension": ".pdf", "mimeType": "application/pdf"} in reply.json["result"]
    assert (await gateway.get(url, token="wrong")).status == 401


@pytest.mark.slow
@pytest.mark.parametrize("field", ["files", "file"])
async def test_files_are_converted_in_order_and_fail_alone(gateway: Harness, field: str) -> None:
    status, body = await upload(
        gateway,
        ("a.html", HTML, "text/html"),
        ("b.png", b"\x89PNG", "image/png"),
        ("c.pdf", b"rubbish", "application/pdf"),
        ("d.pdf", pdf_file("Hello"), "application/pdf"),
        field=field,
    )
    assert status == 200
    html, png, broken, pdf = body["result"]
    assert (html["name"], html["mimeType"], html["format"]) == ("a.html", "text/html", "markdown")
    assert (html["data"], html["tokens"]) == ("# Head\n\nText\n", 4)
    assert (png["format"], ".pdf" in png["error"], "data" in png) == ("error", True, False)
    assert (broken["format"], "not a PDF" in broken["error"]) == ("error", True)
    assert pdf["data"] == "Hello\n"
    assert len({each["id"] for each in body["result"]}) == 4


@pytest.mark.slow
async def test_options_of_html_count(gateway: Harness) -> None:
    html = b'<p><a href="/x">there</a></p><nav>menu</nav>'
    options = {"hostname": "example.com", "cssSelector": "p"}
    _, body = await upload(gateway, ("a.html", html, "text/html"), html=options)
    assert body["result"][0]["data"] == "[there](https://example.com/x)\n"


@pytest.mark.slow
async def test_a_workers_binding_sends_base64(gateway: Harness) -> None:
    data = base64.b64encode(HTML).decode()
    body = {"files": [{"name": "a.html", "mimeType": "text/html", "data": data}], "options": {}}
    reply = await gateway.post(gateway.root("/to-everything/markdown/transformer"), body)
    assert reply.status == 200
    assert reply.json["result"][0]["data"] == "# Head\n\nText\n"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", "'/'"),
        ({}, "'/'"),
        ({"files": []}, "'/files'"),
        ({"files": [{"name": "a", "data": "%"}]}, "'/files/0/data'"),
        ({"files": [{"name": "a", "data": ""}] * 17}, "'/files'"),
        (
            {
                "files": [{"name": "a", "data": ""}],
                "options": {"conversionOptions": {"output": {"format": "pdf"}}},
            },
            "'/conversionOptions/output/format'",
        ),
    ],
)
async def test_bad_requests_are_named(gateway: Harness, body: Any, field: str) -> None:
    reply = await gateway.post(gateway.root("/to-everything/markdown/transformer"), body)
    assert reply.status == 400
    assert field in reply.json["errors"][0]["message"]


async def test_too_large_a_file_and_too_many_are_refused(gateway: Harness) -> None:
    status, body = await upload(gateway, ("a.txt", b"x" * (10 * 1024 * 1024 + 1), "text/plain"))
    assert (status, body["errors"][0]["code"]) == (413, 3006)
    status, body = await upload(gateway, *[("a.txt", b"x", "text/plain")] * 17)
    assert (status, "'/files'" in body["errors"][0]["message"]) == (400, True)
    status, body = await upload(gateway)
    assert status == 400
