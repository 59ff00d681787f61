"""From the bytes of an image to the patches that a vision tower reads.

The same pixels always give the same patches and the same digest, whatever file format they came in. Pure and
thread-safe; an image takes up to a second of one core, so it has no place on an event loop.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from hashlib import sha256
from io import BytesIO
from typing import Any, Final

import numpy as np
from PIL import Image, UnidentifiedImageError

from backend.text.data_urls import decode_data_url, find_image_url
from backend.text.image_rules import ImageRules
from backend.text.media import ImageLimits, ImagePatches
from backend.text.messages import BadMessageError

_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
_DOMAIN: Final = b"embergate.image.1"
_SIZE: Final = struct.Struct("<2I")


class ImageReader:
    """Reads the images of messages by one model's rules, within limits."""

    def __init__(self, rules: ImageRules, limits: ImageLimits) -> None:
        self.limits = limits
        self._rules = rules

    def read(self, part: Mapping[str, Any], path: str) -> ImagePatches:
        """Decode and prepare the image of a message part; blocks.

        Args:
            part: as the client sent it.
            path: where it stands in the request.

        Raises:
            BadMessageError: naming the field, when there is no image that can be read within the limits.
        """
        url, path = find_image_url(part, path)
        data = decode_data_url(url, path, max_bytes=self.limits.max_bytes)
        image = _decode(data, path, self.limits.max_pixels)
        return prepare(image, self._rules)


def prepare(image: Image.Image, rules: ImageRules) -> ImagePatches:
    """Scale, pad and cut an RGB image."""
    digest = sha256(b"".join((_DOMAIN, rules.encode(), _SIZE.pack(*image.size))))
    digest.update(image.tobytes())
    scaled = image.resize(rules.scaled_size(*image.size), Image.Resampling.BICUBIC)
    width, height = rules.padded_size(*scaled.size)
    canvas = np.zeros((height, width, 3), dtype=np.uint8)
    canvas[: scaled.height, : scaled.width] = np.asarray(scaled)
    size = rules.patch_size
    rows, columns = height // size, width // size
    patches = canvas.reshape(rows, size, columns, size, 3).transpose(0, 2, 4, 1, 3)
    return ImagePatches(
        patches=patches.tobytes(),
        rows=rows,
        columns=columns,
        num_tokens=(height // rules.token_size) * (width // rules.token_size),
        digest=digest.digest(),
    )


def _decode(data: bytes, path: str, max_pixels: int) -> Image.Image:
    """The image as RGB; of an animation, its first frame."""
    try:
        # Only the header is read here; the size is checked before any memory is taken for pixels.
        with Image.open(BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise _too_many_pixels(path, max_pixels)
            return _to_rgb(image)
    except BadMessageError:
        raise
    except Image.DecompressionBombError:
        raise _too_many_pixels(path, max_pixels) from None
    except UnidentifiedImageError:
        raise BadMessageError(path, "is not a PNG, JPEG, WebP or GIF image") from None
    except Exception as error:  # decoders raise anything at all on damaged files
        raise BadMessageError(path, "the image is damaged") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    image.load()
    if image.mode.startswith("I"):  # 16 bits of grey, of which the upper 8 are kept
        grey = np.asarray(image).astype(np.int64) >> 8
        return Image.fromarray(grey.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "P":  # its colours may be transparent, which only RGBA can say
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def _too_many_pixels(path: str, max_pixels: int) -> BadMessageError:
    return BadMessageError(path, f"the image has more than {max_pixels} pixels")
