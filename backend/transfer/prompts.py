"""Which blocks of a prompt can be brought from another replica, and what they are called."""

from __future__ import annotations

import msgspec

from backend.engine.messages import MediaSpan, SamplingParams, SequenceRequest
from backend.engine.prefix_cache import block_digest, root_digest
from backend.engine.sequence import Sequence

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class Prompt(msgspec.Struct, frozen=True):
    """What determines the content of a prompt's blocks."""

    token_ids: list[int]
    cache_salt: bytes = b""
    media: tuple[MediaSpan, ...] = ()

    def head_for(self, block_size: int) -> Prompt:
        """The part that another replica is asked for: all full blocks before the last token, and one token
        more, because an engine always computes one. It ends within no image.
        """
        num_tokens = (len(self.token_ids) - 1) // block_size * block_size + 1
        while any(span.start < num_tokens < span.end for span in self.media):
            num_tokens -= block_size
        if num_tokens <= 1:
            return Prompt([])
        media = tuple(span for span in self.media if span.end <= num_tokens)
        return Prompt(self.token_ids[:num_tokens], self.cache_salt, media)

    def digests(self, block_size: int) -> list[bytes]:
        """The digests of its full blocks, chained as the engine's own."""
        sequence = Sequence(self.as_request(0))
        digests: list[bytes] = []
        parent = root_digest(self.cache_salt)
        for index in range(len(self.token_ids) // block_size):
            token_ids = self.token_ids[index * block_size : (index + 1) * block_size]
            parent = block_digest(parent, token_ids, sequence.extra_of_block(index, block_size))
            digests.append(parent)
        return digests

    def as_request(self, sequence_id: int, exports_from: int | None = None) -> SequenceRequest:
        """The sequence that computes it."""
        return SequenceRequest(
            sequence_id=sequence_id,
            prompt_token_ids=self.token_ids,
            sampling=_ONE_TOKEN,
            cache_salt=self.cache_salt,
            media=self.media,
            exports_from=exports_from,
        )
