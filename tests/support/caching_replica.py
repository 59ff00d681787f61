"""A scripted replica whose counts of cached tokens come from the engine's own block pool and prefix cache."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

from aiohttp import web
from xxhash import xxh3_64

from backend.text.model_text import ModelText
from simulator.cache_replay import CountingPool
from simulator.trace import TraceEntry
from tests.support.fake_replica import FakeReplica, Script

BLOCK_TOKENS = 16


class CachingReplica(FakeReplica):
    """Encodes prompts with a model's tokenizer, keeps ``num_blocks`` blocks, and says ``answer`` at once."""

    def __init__(self, replica_id: str, text: ModelText, num_blocks: int, answer: object) -> None:
        super().__init__(replica_id)
        self._text = text
        self._pool = CountingPool(replica_id, num_blocks)
        self.script = Script(tokens=[json.dumps(answer)])

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        said = "\n".join(f"{message['role']}: {message['content']}" for message in body["messages"])
        token_ids = await asyncio.to_thread(self._text.encode_text, said)
        entry = TraceEntry(0, len(token_ids), 1, _chained(body["cache_salt"], token_ids))
        _, num_cached = self._pool.take_in(entry, BLOCK_TOKENS)
        self.script = replace(self.script, prompt_tokens=len(token_ids), cached_tokens=num_cached)
        return await super()._chat(request)


def _chained(salt: str, token_ids: list[int]) -> list[int]:
    """A number for each full block that stands for all before it, too."""
    digest = xxh3_64(salt.encode())
    blocks = []
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        digest.update(repr(token_ids[start : start + BLOCK_TOKENS]).encode())
        blocks.append(digest.intdigest())
    return blocks
