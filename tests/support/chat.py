"""A client of both chat surfaces that notices everything about how an answer ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from embergate.dev_account import DevAccount

Messages = list[dict[str, Any]]


@dataclass
class Outcome:
    """One request as its client saw it."""

    status: int = 0
    request_id: str = ""
    replica: str = ""
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    is_done: bool = False
    error: str = ""
    frames: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether the client has every reason to believe that this is the whole answer."""
        return self.status == 200 and self.is_done and not self.error

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage["prompt_tokens"])

    @property
    def completion_tokens(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def cached_tokens(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


class ChatClient:
    """Speaks as one account. Use as an async context manager."""

    def __init__(self, account: DevAccount, timeout_s: float = 120.0) -> None:
        self._base = f"{account.url}/client/v4/accounts/{account.account_id}/ai"
        self._headers = {"authorization": f"Bearer {account.api_token}"}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def __aenter__(self) -> ChatClient:
        self._session = aiohttp.ClientSession(
            timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0), headers=self._headers
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def run(self, model: str, messages: Messages, *, session: str = "", **options: Any) -> Outcome:
        """The native surface, whole or streamed (``stream=True``)."""
        body = {"messages": messages, **options}
        return await self._ask(f"{self._base}/run/{model}", body, session)

    async def complete(self, model: str, messages: Messages, *, session: str = "", **options: Any) -> Outcome:
        """The OpenAI surface, whole or streamed (``stream=True``)."""
        body = {"model": model, "messages": messages, **options}
        if options.get("stream"):
            body["stream_options"] = {"include_usage": True}
        return await self._ask(f"{self._base}/v1/chat/completions", body, session)

    async def _ask(self, url: str, body: dict[str, Any], session: str) -> Outcome:
        outcome = Outcome()
        headers = {"x-session-affinity": session} if session else {}
        try:
            async with self._session.post(url, json=body, headers=headers) as response:
                outcome.status = response.status
                outcome.request_id = response.headers.get("cf-ai-req-id", "")
                outcome.replica = response.headers.get("x-embergate-replica", "")
                if "event-stream" in response.headers.get("content-type", ""):
                    await _read_stream(response, outcome)
                else:
                    _read_whole(await response.json(), outcome)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            outcome.error = outcome.error or repr(error)
        return outcome


def _read_whole(body: dict[str, Any], outcome: Outcome) -> None:
    if body.get("errors"):
        outcome.error = str(body["errors"])
        return
    completion = body.get("result", body)
    outcome.text = completion["choices"][0]["message"]["content"]
    outcome.finish_reason = completion["choices"][0]["finish_reason"]
    outcome.usage = completion["usage"]
    outcome.frames = [completion]
    outcome.is_done = True


async def _read_stream(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    async for raw in response.content:
        line = raw.strip()
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            outcome.is_done = True
            continue
        frame = json.loads(data)
        outcome.frames.append(frame)
        if frame.get("error") or frame.get("errors"):
            outcome.error = str(frame.get("error") or frame["errors"])
        outcome.usage = frame.get("usage") or outcome.usage
        for choice in frame.get("choices", []):
            outcome.text += choice["delta"].get("content") or ""
            outcome.finish_reason = choice["finish_reason"] or outcome.finish_reason


async def converse(
    client: ChatClient, model: str, session: str, questions: Sequence[str], system: str, **options: Any
) -> list[Outcome]:
    """One conversation, turn by turn; the answers become part of it."""
    messages: Messages = [{"role": "system", "content": system}]
    outcomes = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        outcome = await client.complete(model, messages, session=session, **options)
        outcomes.append(outcome)
        messages.append({"role": "assistant", "content": outcome.text})
    return outcomes
