"""Images as messages hold them: ``data:`` URLs, and nothing that would have to be fetched."""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from backend.text.messages import BadMessageError

NOT_ALLOWED: Final = "image_url_not_allowed"
"""The code of errors about images that are elsewhere."""

_WHITE_SPACE: Final = b" \t\r\n"


def find_image_url(part: Mapping[str, Any], path: str) -> tuple[str, str]:
    """The URL of an image part, and the path of the field that holds it.

    Args:
        part: ``{"type": "image_url", "image_url": {"url": ...}}``, or with the URL where the inner object
            is, as older clients send it; ``image`` instead of ``image_url`` is taken too.
        path: where the part stands.

    Raises:
        BadMessageError: when there is no URL where one belongs.
    """
    name = "image_url" if part.get("image_url") is not None else "image"
    holder = part.get(name)
    if isinstance(holder, str):
        return holder, f"{path}.{name}"
    if isinstance(holder, Mapping):
        url = holder.get("url")
        if not isinstance(url, str):
            raise BadMessageError(f"{path}.{name}.url", "must be a string")
        return url, f"{path}.{name}.url"
    raise BadMessageError(f"{path}.image_url", "must be an object with a url")


def decode_data_url(url: str, path: str, *, max_bytes: int) -> bytes:
    """The bytes that a base64 ``data:`` URL holds.

    Args:
        url: the URL; its media type is not looked at, as the bytes say themselves what they are.
        path: the field to name.
        max_bytes: how many bytes it may hold.

    Raises:
        BadMessageError: when it is no such URL, or too long.
    """
    if url[:5].lower() != "data:":
        raise BadMessageError(
            path,
            "must be a data: URL (data:image/png;base64,...); images elsewhere are not fetched",
            NOT_ALLOWED,
        )
    head, comma, text = url[5:].partition(",")
    if not comma or head.rsplit(";", 1)[-1].strip().lower() != "base64":
        raise BadMessageError(path, "must be a base64 data: URL (data:image/png;base64,...)")
    if not text.isascii():
        raise BadMessageError(path, "is not valid base64")
    raw = (unquote_to_bytes(text) if "%" in text else text.encode()).translate(None, _WHITE_SPACE)
    if len(raw) * 3 // 4 > max_bytes + 2:
        raise _too_long(path, max_bytes)
    try:
        data = binascii.a2b_base64(raw + b"=" * (-len(raw) % 4), strict_mode=True)
    except binascii.Error:
        raise BadMessageError(path, "is not valid base64") from None
    if len(data) > max_bytes:
        raise _too_long(path, max_bytes)
    if not data:
        raise BadMessageError(path, "holds no image")
    return data


def _too_long(path: str, max_bytes: int) -> BadMessageError:
    return BadMessageError(path, f"the image is larger than {max_bytes} bytes")
