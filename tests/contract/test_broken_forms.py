"""Bodies that are no multipart forms are the client's fault, never an error of ours."""

from __future__ import annotations

import pytest

from tests.support.gateway_harness import TOKEN, Harness

PATHS = ["/v1/files", "account/v1/files", "account/tomarkdown"]
MULTIPART = "multipart/form-data; boundary=X"
BROKEN = {
    "empty": (MULTIPART, b""),
    "only a boundary": (MULTIPART, b"--X"),
    "a part without headers": (MULTIPART, b"--X\r\n\r\n"),
    "another boundary": (MULTIPART, b"--Y\r\n\r\nx\r\n--Y--\r\n"),
    "no boundary": ("multipart/form-data", b"--X\r\n\r\nx\r\n--X--\r\n"),
    "an empty boundary": ("multipart/form-data; boundary=", b"--\r\n\r\nx\r\n----\r\n"),
    "a header broken by a line end": (
        MULTIPART,
        b'--X\r\nContent-Disposition: form-data; name="file"; filename="a"b\r\n.txt"\r\n\r\nx\r\n--X--\r\n',
    ),
    "cut off in a part": (
        MULTIPART,
        b'--X\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nhalf',
    ),
    "an unknown transfer encoding": (
        MULTIPART,
        b'--X\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n'
        b"Content-Transfer-Encoding: rot13\r\n\r\nx\r\n--X--\r\n",
    ),
    "a form in the form": (
        MULTIPART,
        b"--X\r\nContent-Type: multipart/mixed; boundary=Z\r\n\r\n--Z\r\n\r\nx\r\n--Z--\r\n--X--\r\n",
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fault", BROKEN)
async def test_a_broken_form_is_refused(gateway: Harness, path: str, fault: str) -> None:
    kind, body = BROKEN[fault]
    url = gateway.url(path.removeprefix("account")) if path.startswith("account") else gateway.root(path)
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": kind}
    async with gateway.session.post(url, data=body, headers=headers) as response:
        answer = await response.json()
    assert response.status == 400, answer
    assert answer.get("errors") or answer["error"]["message"]
