"""One streamed chat request as a client sees it: when its tokens came, what the API says it used."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from loadtest.conversation import Answer

REQUEST_ID_HEADER = "cf-ai-req-id"


@dataclass(frozen=True)
class Endpoint:
    """Where to ask. ``url`` is the gateway's, without a path."""

    url: str
    account_id: str
    token: str
    model: str

    @property
    def api(self) -> str:
        """Where the account's routes begin."""
        return f"{self.url.rstrip('/')}/client/v4/accounts/{self.account_id}/ai"

    def session(self, max_connections: int, timeout_s: float) -> aiohttp.ClientSession:
        """A connection pool that shows the token."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections),
            headers={"Authorization": f"Bearer {self.token}"},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        )


@dataclass
class Exchange:
    """What became of a request. Times are :func:`time.perf_counter` seconds; 0 for what never came.

    ``has_left``: the client closed the connection on purpose. ``num_pieces``: chunks that brought something.
    """

    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    status: int = 0
    request_id: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_pieces: int = 0
    has_left: bool = False
    error: str = ""

    @property
    def is_whole(self) -> bool:
        return not self.error and not self.has_left

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None with fewer than two."""
        rest = self.completion_tokens - 1
        return (self.last_s - self.first_s) / rest if rest > 0 and self.first_s else None


async def ask(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    body: Mapping[str, Any],
    affinity: str = "",
    leave_after: int | None = None,
) -> Exchange:
    """Send one request, streamed unless the body says otherwise, and read it to its end.

    Args:
        body: what goes beside the model's name.
        affinity: the session's key; empty sends none.
        leave_after: close the connection after so many pieces of text.
    """
    exchange = Exchange(sent_s=time.perf_counter())
    asked = {"model": endpoint.model, "stream": True, **body}
    if asked["stream"]:
        asked["stream_options"] = {"include_usage": True}
    headers = {"x-session-affinity": affinity} if affinity else {}
    try:
        async with session.post(
            f"{endpoint.api}/v1/chat/completions", json=asked, headers=headers
        ) as response:
            exchange.status = response.status
            exchange.request_id = response.headers.get(REQUEST_ID_HEADER, "")
            if response.status != 200:
                exchange.error = f"{response.status}: {(await response.text())[:200]}"
            elif asked["stream"]:
                await _read_stream(response, exchange, leave_after)
            else:
                _take_usage(exchange, (await response.json())["usage"])
                exchange.first_s = exchange.last_s = time.perf_counter()
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        exchange.error = f"{type(error).__name__}: {error}"[:200]
    return exchange


async def _read_stream(response: aiohttp.ClientResponse, exchange: Exchange, leave_after: int | None) -> None:
    answer = Answer()
    async for line in response.content:
        answer.read(line)
        if answer.num_pieces > exchange.num_pieces:
            exchange.num_pieces = answer.num_pieces
            exchange.last_s = time.perf_counter()
            exchange.first_s = exchange.first_s or exchange.last_s
            if leave_after is not None and exchange.num_pieces >= leave_after:
                exchange.has_left = True
                response.close()
                return
    exchange.error = answer.problem
    _take_usage(exchange, answer.usage)
    if not exchange.first_s:  # an answer of tokens without text
        exchange.first_s = exchange.last_s = time.perf_counter()


def _take_usage(exchange: Exchange, usage: Mapping[str, Any]) -> None:
    exchange.prompt_tokens = int(usage.get("prompt_tokens", 0))
    exchange.completion_tokens = int(usage.get("completion_tokens", 0))
    exchange.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
