"""The images of a request before it goes to a replica: refused, let through, or fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from yarl import URL

from gateway.config import ImagesConfig, ServedModel
from gateway.edge.admission import BodyBudget
from gateway.errors import bad_input, no_capacity
from gateway.images.fetcher import FetchesBusyError, ImageFetcher, ImageNotFetchedError
from gateway.images.hosts import HostList, UrlNotAllowedError
from gateway.wire.embeddings import EmbeddingsRequest
from gateway.wire.image_parts import ImageReference, find_images, with_urls
from gateway.wire.openai import ChatRequest

NOT_ALLOWED = "image_url_not_allowed"
"""Stands in refusals of images that are elsewhere, for programs that look for it."""

_BASE64_GROWTH = 4 / 3


class ImagePlan:
    """The images of one request: which have to be fetched, and what those hold of the gateway's memory.

    ``messages`` are the request's, once everything is fetched with every image in them. ``num_url_chars`` is
    how much of the request's body is images.
    """

    __slots__ = ("_budget", "_num_taken", "messages", "num_url_chars", "remote", "urls")

    def __init__(
        self,
        messages: list[dict[str, Any]],
        budget: BodyBudget,
        *,
        remote: Sequence[ImageReference] = (),
        urls: Sequence[URL] = (),
        num_url_chars: int = 0,
    ) -> None:
        self.messages = messages
        self.remote = remote
        self.urls = urls
        self.num_url_chars = num_url_chars
        self._budget = budget
        self._num_taken = 0

    def take(self, num_bytes: int) -> bool:
        """Reserve memory for so many fetched bytes; False when there is none."""
        num_encoded = int(num_bytes * _BASE64_GROWTH) + 1
        if not self._budget.take(num_encoded):
            return False
        self._num_taken += num_encoded
        return True

    def release(self) -> None:
        """Give back what was taken; the request is over. Idempotent."""
        if self._num_taken:
            self._budget.give_back(self._num_taken)
            self._num_taken = 0


class ImageIntake:
    """Decides about the images of requests.

    Args:
        config: how many there may be, and from where.
        fetcher: fetches those that are elsewhere.
        budget: the memory that request bodies share.

    Raises:
        ValueError: an allowed host is no host name.
    """

    def __init__(self, config: ImagesConfig, fetcher: ImageFetcher, budget: BodyBudget) -> None:
        self._config = config
        self._hosts = HostList(config.allowed_hosts, allows_plain_http=config.allows_plain_http)
        self._fetcher = fetcher
        self._budget = budget

    def plan(self, request: ChatRequest | EmbeddingsRequest, model: ServedModel) -> ImagePlan:
        """Check the images of a request; nothing is fetched yet.

        Raises:
            Refusal: 400 naming the part, when the model takes text only, there are too many images, or one is
                where nothing is fetched from.
        """
        if not isinstance(request, ChatRequest):
            return ImagePlan([], self._budget)
        images = find_images(request.messages)
        if not images:
            return ImagePlan(request.messages, self._budget)
        if model.sees_images is False:
            raise bad_input(f"{images[0].pointer}/type", f"{model.id} takes text only, no images")
        most = self._config.max_per_request
        if len(images) > most:
            raise bad_input(images[most].pointer, f"a request may hold at most {most} images")
        remote = [image for image in images if not image.is_inline]
        urls = [self._parse(image) for image in remote]
        most = self._config.max_fetched_per_request
        if len(remote) > most:
            raise bad_input(
                remote[most].url_pointer, f"at most {most} images of a request are fetched; send data: URLs"
            )
        num_url_chars = sum(len(image.url) for image in images)
        return ImagePlan(
            request.messages, self._budget, remote=remote, urls=urls, num_url_chars=num_url_chars
        )

    async def fetch(self, plan: ImagePlan) -> None:
        """Bring every image of a request into its messages.

        Raises:
            Refusal: 400 naming the image that cannot be had, 429 when too many are being fetched.
        """
        if not plan.remote:
            return
        # The same URL is fetched once, and is the same picture everywhere.
        first = dict(zip(reversed(plan.urls), reversed(plan.remote), strict=True))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    url: group.create_task(self._fetch_one(image, url, plan)) for url, image in first.items()
                }
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        fetched = [tasks[url].result() for url in plan.urls]
        self._check_total(plan.remote, fetched)
        plan.messages = with_urls(plan.messages, plan.remote, fetched)

    def _check_total(self, images: Sequence[ImageReference], fetched: Sequence[str]) -> None:
        """Whatever is fetched has to fit into what a replica takes, beside what the client sent itself."""
        most = self._config.max_fetched_bytes
        num_bytes = 0.0
        for image, url in zip(images, fetched, strict=True):
            num_bytes += (len(url) - url.index(",") - 1) / _BASE64_GROWTH
            if num_bytes > most:
                problem = f"the fetched images of a request may have at most {most} bytes together"
                raise bad_input(image.url_pointer, problem)

    async def _fetch_one(self, image: ImageReference, url: URL, plan: ImagePlan) -> str:
        try:
            return await self._fetcher.fetch(url, plan.take)
        except ImageNotFetchedError as error:
            raise bad_input(image.url_pointer, str(error)) from error
        except FetchesBusyError:
            raise no_capacity() from None

    def _parse(self, image: ImageReference) -> URL:
        try:
            return self._hosts.parse(image.url)
        except UrlNotAllowedError as error:
            raise bad_input(image.url_pointer, f"{NOT_ALLOWED}: {error}") from None
