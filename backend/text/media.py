"""Images of a conversation on their way into its prompt. Knows no image format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from backend.engine.messages import MediaSpan

_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal"})


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What images may cost: ``max_bytes`` of one as a file, ``max_pixels`` of one decoded, ``max_tokens`` of
    all in a request."""

    max_bytes: int = 20 * 1024 * 1024
    max_pixels: int = 40_000_000
    max_tokens: int = 16_384


@dataclass(frozen=True, slots=True)
class ImagePatches:
    """One image, ready for the tower.

    ``patches`` are ``rows * columns`` patches, row by row, each of 3 colour planes of ``patch_size`` squared
    bytes, 0 to 255. ``digest`` (SHA-256) names the decoded pixels and the rules that they were prepared by.
    """

    patches: bytes
    rows: int
    columns: int
    num_tokens: int
    digest: bytes


class ReadsImages(Protocol):
    """Reads images of messages; :class:`backend.text.images.ImageReader` is the one that does."""

    limits: ImageLimits

    def read(self, part: Mapping[str, Any], path: str) -> ImagePatches:
        """Read the image of a message part.

        Raises:
            BadMessageError: naming the field that is wrong.
        """
        ...


def may_hold_media(messages: Sequence[Any]) -> bool:
    """Whether any content is something else than text; True also for what is of no known form."""
    return any(
        isinstance(part, Mapping) and part.get("type") not in _TEXT_PARTS
        for message in messages
        if isinstance(message, Mapping) and isinstance(content := message.get("content"), list)
        for part in content
    )


def expand_placeholders(
    token_ids: list[int], placeholder: int, images: Sequence[ImagePatches]
) -> tuple[list[int], tuple[MediaSpan, ...]]:
    """Give every image as many placeholders as it has tokens.

    Args:
        token_ids: a prompt with one placeholder per image, in order.
        placeholder: its id.
        images: the images.

    Returns:
        The prompt, and where in it the images are.
    """
    if not images:
        return token_ids, ()
    expanded: list[int] = []
    spans: list[MediaSpan] = []
    position = 0
    for image in images:
        found = token_ids.index(placeholder, position)
        expanded += token_ids[position:found]
        spans.append(
            MediaSpan(
                start=len(expanded),
                num_tokens=image.num_tokens,
                rows=image.rows,
                columns=image.columns,
                patches=image.patches,
                digest=image.digest,
            )
        )
        expanded += [placeholder] * image.num_tokens
        position = found + 1
    return expanded + token_ids[position:], tuple(spans)
