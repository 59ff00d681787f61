"""Images among the contents of messages: found, counted and replaced here, decoded by a replica only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class ImageReference(msgspec.Struct, frozen=True):
    """An image among the contents of ``messages``: part ``part`` of message ``message``.

    ``pointer`` is the part's place in the request's body.
    """

    message: int
    part: int
    url: str
    is_bare: bool

    @property
    def pointer(self) -> str:
        return f"/messages/{self.message}/content/{self.part}"

    @property
    def url_pointer(self) -> str:
        return f"{self.pointer}/image_url{'' if self.is_bare else '/url'}"

    @property
    def is_inline(self) -> bool:
        """Whether the URL holds the image itself."""
        return self.url[:5].lower() == "data:"


def find_images(messages: Sequence[dict[str, Any]]) -> list[ImageReference]:
    """All images, in the order of the messages; their parts must have been checked."""
    return [
        ImageReference(message_index, part_index, _url_of(part), isinstance(part["image_url"], str))
        for message_index, message in enumerate(messages)
        if isinstance(content := message.get("content"), list)
        for part_index, part in enumerate(content)
        if part.get("type") == "image_url"
    ]


def with_urls(
    messages: Sequence[dict[str, Any]], images: Sequence[ImageReference], urls: Sequence[str]
) -> list[dict[str, Any]]:
    """Messages whose images have other URLs; what is given stays as it was."""
    changed = list(messages)
    for image, url in zip(images, urls, strict=True):
        message = changed[image.message]
        content = list(message["content"])
        content[image.part] = {"type": "image_url", "image_url": {"url": url}}
        changed[image.message] = {**message, "content": content}
    return changed


def with_image(messages: list[dict[str, Any]], url: str) -> list[dict[str, Any]] | None:
    """Messages whose last one of a user begins with an image; None when no user says anything."""
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if message.get("role") == "user":
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
            image = {"type": "image_url", "image_url": {"url": url}}
            return [*messages[:index], {**message, "content": [image, *parts]}, *messages[index + 1 :]]
    return None


def _url_of(part: dict[str, Any]) -> str:
    holder = part["image_url"]
    url: str = holder if isinstance(holder, str) else holder["url"]
    return url
