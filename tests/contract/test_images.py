"""Images in requests: what reaches a replica, what is refused by name, what is fetched on whose behalf."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web

from backend.wire import ErrorDetail
from gateway.config import ImagesConfig
from tests.contract.test_refusals import assert_inference_refusal, message_of
from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import MODEL, MODELS, Harness, gateway_config

RUN = f"/run/{MODEL}"
CHAT = "/v1/chat/completions"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 3
DATA_URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
TEXT = {"type": "text", "text": "What is it?"}
StartGateway = Callable[..., Awaitable[Harness]]


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def said(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, TEXT]}]


def models(sees_images: bool | None) -> list[Any]:
    return [msgspec.structs.replace(model, sees_images=sees_images) for model in MODELS]


class Site:
    """A host that images lie on; ``seen`` are the paths that were asked for."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.was_asked = asyncio.Event()
        self.headers: list[dict[str, str]] = []
        self.body = PNG
        self.delay_s = 0.0

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{name:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        self.seen.append(name)
        self.was_asked.set()
        self.headers.append({key.lower(): value for key, value in request.headers.items()})
        if name == "redirect":
            return web.Response(status=302, headers={"location": "/cat.png"})
        if name == "missing":
            return web.Response(status=404)
        if name == "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            while True:  # no length is announced
                await response.write(self.body or PNG)
        if name == "slow":
            response = web.StreamResponse()
            await response.prepare(request)
            for byte in self.body:
                await response.write(bytes([byte]))
                await asyncio.sleep(0.1)
        await asyncio.sleep(self.delay_s)
        # What a host calls its file is not believed.
        return web.Response(body=self.body, content_type="text/html")


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    await site.start()
    yield site
    await site.stop()


@pytest.fixture
async def fetching(start_gateway: StartGateway, site: Site) -> Harness:
    images = ImagesConfig(
        allowed_hosts=[f"localhost:{site.port}", f"127.0.0.1:{site.port}"],
        allowed_networks=["127.0.0.0/8", "::1/128"],
        allows_plain_http=True,
        max_fetched_per_request=2,
        max_fetched_bytes=100_000,
        fetch_timeout_s=0.6,
    )
    return await start_gateway(gateway_config(images=images))


def only_request(replicas: list[FakeReplica]) -> dict[str, Any]:
    (request,) = replicas[0].requests + replicas[1].requests
    return request


@pytest.mark.parametrize("path", [RUN, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sees_images", [None, True])
async def test_an_image_reaches_the_replica_as_it_came(
    start_gateway: StartGateway,
    replicas: list[FakeReplica],
    path: str,
    stream: bool,
    sees_images: bool | None,
) -> None:
    gateway = await start_gateway(models=models(sees_images))
    parts = [image(DATA_URL, detail="high"), {"type": "image_url", "image_url": DATA_URL}]
    reply = await gateway.chat(path=path, stream=stream, messages=said(*parts))
    assert reply.status == 200
    assert only_request(replicas)["messages"] == said(*parts)


@pytest.mark.parametrize("path", [RUN, CHAT])
async def test_a_model_that_takes_text_only_says_so_and_names_the_part(
    start_gateway: StartGateway, replicas: list[FakeReplica], path: str
) -> None:
    gateway = await start_gateway(models=models(False))
    messages = [{"role": "user", "content": "hi"}, *said(TEXT, image(DATA_URL))]
    reply = await gateway.chat(path=path, messages=messages)
    assert_inference_refusal(reply, 400, 5006)
    assert f"'/messages/1/content/1/type': {MODEL} takes text only, no images" in message_of(reply)
    assert (await gateway.chat(path=path, messages=said(TEXT))).status == 200
    assert len(replicas[0].requests + replicas[1].requests) == 1


WRONG_PARTS: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "image_url"}, "image_url", "must be an object with a url"),
    ({"type": "image_url", "image_url": {}}, "image_url/url", "must be a string"),
    ({"type": "image_url", "image_url": {"url": 7}}, "image_url/url", "must be a string"),
    (image(DATA_URL, detail="huge"), "image_url/detail", "must be one of auto, low, high"),
    ({"type": "video_url", "video_url": {"url": DATA_URL}}, "type", "no model here takes video"),
    ({"type": "input_audio", "input_audio": {}}, "type", "no model here takes audio"),
    ({"type": "file", "file": {}}, "type", "no model here takes files"),
    ({"type": "picture"}, "type", "must be 'text' or 'image_url'"),
    ({"type": ["image_url"]}, "type", "must be 'text' or 'image_url'"),
]


async def test_a_part_of_a_wrong_form_is_refused_by_name(gateway: Harness) -> None:
    for part, field, problem in WRONG_PARTS:
        for path in (RUN, CHAT):
            reply = await gateway.chat(path=path, messages=said(part))
            assert_inference_refusal(reply, 400, 5006)
            assert f"'/messages/0/content/0/{field}': {problem}" in message_of(reply), part


ELSEWHERE = (
    "http://127.0.0.1:{port}/cat.png",
    "http://localhost:{port}/cat.png",
    "http://2130706433:{port}/",
    "http://0x7f000001:{port}/",
    "http://0177.0.0.1:{port}/",
    "http://127.1:{port}/",
    "http://[::1]:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/",
    "http://[2002:7f00:1::]:{port}/",
    "http://[64:ff9b::7f00:1]/",
    "http://0.0.0.0:{port}/",
    "http://169.254.169.254/latest/meta-data/",
    "http://100.64.0.1/",
    "http://10.0.0.1/",
    "https://example.com/cat.png",
    "file:///etc/passwd",
    "ftp://example.com/cat.png",
    "//example.com/cat.png",
    "cat.png",
    "",
)


@pytest.mark.parametrize("path", [RUN, CHAT])
async def test_br_89_nothing_is_fetched_by_default_whatever_the_spelling(
    gateway: Harness, site: Site, replicas: list[FakeReplica], path: str
) -> None:
    """BR-89, complaint F3: a 400 that names the image, and no connection to anywhere."""
    for url in ELSEWHERE:
        reply = await gateway.chat(path=path, messages=said(image(url.format(port=site.port))))
        assert_inference_refusal(reply, 400, 5006)
        problem = "'/messages/0/content/0/image_url/url': image_url_not_allowed: "
        assert problem in message_of(reply), (url, message_of(reply))
    assert site.seen == []
    assert not replicas[0].requests + replicas[1].requests


NOT_LISTED = (
    "http://2130706433:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/",
    "http://localhost.:1/",
    "http://user:word@localhost:{port}/cat.png",
    "http://localhost:{port}@example.com/",
    "https://sub.localhost:{port}/",
    "gopher://localhost:{port}/",
    "http://localhost:{port}/" + "x" * 5000,
    "http://[::1/",
)


async def test_a_host_that_is_not_on_the_list_is_not_asked(fetching: Harness, site: Site) -> None:
    for url in NOT_LISTED:
        reply = await fetching.chat(messages=said(image(url.format(port=site.port))))
        assert_inference_refusal(reply, 400, 5006)
        problem = "'/messages/0/content/0/image_url/url': image_url_not_allowed: "
        assert problem in message_of(reply), (url, message_of(reply))
    assert site.seen == []


async def test_an_image_of_an_allowed_host_is_fetched_once_and_sent_as_bytes(
    fetching: Harness, site: Site, replicas: list[FakeReplica]
) -> None:
    replicas[0].script.status = replicas[1].script.status = 429
    url = f"http://localhost:{site.port}/cat.png?size=1#part"
    messages = said(image(url), {"type": "image_url", "image_url": url})
    assert (await fetching.chat(messages=messages)).status == 429
    assert site.seen == ["cat.png"], "two parts, two replicas, one fetch"
    for replica in replicas:
        assert replica.requests[0]["messages"] == said(image(DATA_URL), image(DATA_URL))
    (headers,) = site.headers
    assert headers["host"] == f"localhost:{site.port}"
    assert not {"authorization", "cookie", "referer", "user-agent"} & set(headers)
    assert fetching.gateway is not None
    assert fetching.gateway._bodies.num_taken == 0


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("redirect", "redirects elsewhere, which is not followed"),
        ("missing", "answers with status 404"),
        ("endless", "larger than 100000 bytes"),
        ("slow", "took longer than 0.6 s"),
    ],
)
async def test_what_cannot_be_fetched_is_a_400_that_names_the_image(
    fetching: Harness, site: Site, replicas: list[FakeReplica], name: str, problem: str
) -> None:
    messages = [{"role": "user", "content": "hi"}, *said(image(f"http://localhost:{site.port}/{name}"))]
    started = asyncio.get_running_loop().time()
    reply = await fetching.chat(messages=messages, stream=True)
    assert asyncio.get_running_loop().time() - started < 2
    assert_inference_refusal(reply, 400, 5006)
    assert "'/messages/1/content/0/image_url/url': the image" in message_of(reply)
    assert problem in message_of(reply)
    assert site.seen == [name]
    assert not replicas[0].requests + replicas[1].requests
    assert await fetching.stopped_records() == []


@pytest.mark.parametrize("body", [b"<html>", b"", b"\x89PNG", b"%PDF-1.7" + bytes(100), b"RIFF0000WAVE" * 9])
async def test_what_is_no_image_is_not_sent_on(
    fetching: Harness, site: Site, replicas: list[FakeReplica], body: bytes
) -> None:
    site.body = body
    reply = await fetching.chat(messages=said(image(f"http://localhost:{site.port}/cat.png")))
    assert_inference_refusal(reply, 400, 5006)
    assert "is not a PNG, JPEG, WebP or GIF image" in message_of(reply)
    assert not replicas[0].requests + replicas[1].requests


async def test_images_that_are_fetched_are_few(fetching: Harness, site: Site) -> None:
    parts = [image(f"http://localhost:{site.port}/{index}.png") for index in range(3)]
    reply = await fetching.chat(messages=said(*parts))
    assert_inference_refusal(reply, 400, 5006)
    assert "'/messages/0/content/2/image_url/url': at most 2 images" in message_of(reply)
    assert site.seen == []


async def test_images_that_are_fetched_are_bounded_together(fetching: Harness, site: Site) -> None:
    site.body = PNG + bytes(60_000)
    one, other = (image(f"http://localhost:{site.port}/{name}.png") for name in "ab")
    assert (await fetching.chat(messages=said(one))).status == 200
    for pair in ((one, other), (one, one)):
        reply = await fetching.chat(messages=said(*pair))
        assert_inference_refusal(reply, 400, 5006)
        assert "'/messages/0/content/1/image_url/url': the fetched images of a request" in message_of(reply)


async def test_images_of_a_request_are_bounded(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(gateway_config(images=ImagesConfig(max_per_request=2)))
    assert (await gateway.chat(messages=said(*[image(DATA_URL)] * 2))).status == 200
    reply = await gateway.chat(messages=[*said(image(DATA_URL)), *said(*[image(DATA_URL)] * 2)])
    assert_inference_refusal(reply, 400, 5006)
    assert "'/messages/1/content/1': a request may hold at most 2 images" in message_of(reply)


async def test_fetched_images_share_the_memory_of_request_bodies(
    start_gateway: StartGateway, site: Site
) -> None:
    images = ImagesConfig(
        allowed_hosts=[f"localhost:{site.port}"],
        allowed_networks=["127.0.0.0/8", "::1/128"],
        allows_plain_http=True,
    )
    gateway = await start_gateway(gateway_config(images=images, max_buffered_body_bytes=900))
    reply = await gateway.chat(messages=said(image(f"http://localhost:{site.port}/cat.png")))
    assert_inference_refusal(reply, 429, 3040)
    assert gateway.gateway is not None
    assert gateway.gateway._bodies.num_taken == 0
    assert (await gateway.chat()).status == 200


async def test_a_client_that_leaves_during_a_fetch_owes_nothing(
    fetching: Harness, site: Site, replicas: list[FakeReplica]
) -> None:
    site.delay_s = 0.5
    asking = asyncio.create_task(fetching.chat(messages=said(image(f"http://localhost:{site.port}/cat.png"))))
    await asyncio.wait_for(site.was_asked.wait(), 5)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.sleep(0.1)
    assert fetching.gateway is not None
    assert fetching.gateway._bodies.num_taken == 0
    assert await fetching.stopped_records() == []
    assert not replicas[0].requests + replicas[1].requests


@pytest.mark.parametrize("given", [list(PNG), base64.b64encode(PNG).decode(), DATA_URL])
@pytest.mark.parametrize("as_prompt", [False, True])
async def test_the_native_image_field_is_the_first_part_of_what_the_user_said(
    gateway: Harness, replicas: list[FakeReplica], given: Any, as_prompt: bool
) -> None:
    question: dict[str, Any] = {"messages": [{"role": "user", "content": "What is it?"}]}
    if as_prompt:
        question = {"prompt": "What is it?"}
    reply = await gateway.post(RUN, {**question, "image": given})
    assert reply.status == 200
    (message,) = only_request(replicas)["messages"]
    assert message["content"][1] == TEXT
    url = message["content"][0]["image_url"]["url"]
    assert base64.b64decode(url.partition(",")[2]) == PNG


async def test_the_native_image_field_has_its_own_refusals(gateway: Harness) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        (RUN, {"image": [256]}, "/image"),
        (RUN, {"image": 7}, "/image"),
        (CHAT, {"image": DATA_URL}, "/image"),
        (RUN, {"image": DATA_URL, "messages": [{"role": "system", "content": "x"}]}, "/image"),
        (RUN, {"image": "https://example.com/cat.png"}, "/messages/0/content/0/image_url/url"),
    ]
    for path, fields, pointer in cases:
        reply = await gateway.chat(path=path, **fields)
        assert_inference_refusal(reply, 400, 5006)
        assert f"'{pointer}" in message_of(reply), (fields, message_of(reply))


async def test_what_a_replica_says_about_an_image_names_the_clients_field(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    param = "messages[0].content[1].image_url.url"
    for replica in replicas:
        replica.script.status = 400
        replica.script.error = ErrorDetail(message=f"{param}: the image is damaged", param=param)
    reply = await gateway.chat(messages=said(TEXT, image(DATA_URL)))
    assert_inference_refusal(reply, 400, 5006)
    assert "Bad input: '/messages/0/content/1/image_url/url': the image is damaged" in message_of(reply)


async def test_an_estimate_does_not_bill_the_length_of_a_file(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    """A replica that is lost, and cannot be asked, in the middle of an answer about a large image."""
    for replica in replicas:
        replica.script.die_after = 2
        replica.script.forgets_usage = True
    large = f"data:image/png;base64,{'A' * 400_000}"
    await gateway.chat(stream=True, messages=said(image(large)))
    (record,) = await gateway.stopped_records()
    assert record.is_estimated
    assert 0 < record.prompt_tokens < 200
