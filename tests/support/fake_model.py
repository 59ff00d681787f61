"""A model without weights: what it says next depends on every token before, and on nothing else.

It keeps a KV memory like a real one does and looks at all of it, so that a block that was lost, shared
wrongly or overwritten makes it fail or say something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from backend.engine.step import ScheduledChunk, StepPlan


class FakeModel:
    """Deterministic next tokens over a vocabulary of ``vocab_size``, computed through paged memory."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 50) -> None:
        self.vocab_size = vocab_size
        self._block_size = block_size
        self._slots: list[tuple[bytes, bytes] | None] = [None] * (num_blocks * block_size)

    def run(self, plan: StepPlan) -> list[bytes]:
        """Compute a step; returns the states after those tokens of each chunk whose logits are wanted."""
        written = [self._slot(chunk, at) for chunk in plan.chunks for at in _positions(chunk)]
        assert len(set(written)) == len(written), "two tokens of one step are written to the same slot"
        states = [self._run_chunk(chunk) for chunk in plan.chunks]
        return [
            state
            for chunk, after in zip(plan.chunks, states, strict=True)
            for state in after[len(after) - chunk.num_rows :]
        ]

    def next_token(self, state: bytes) -> int:
        return int.from_bytes(state[:8], "little") % self.vocab_size

    def read_block(self, block: int) -> bytes:
        """32 bytes a slot: the state before and after its token, zeros where there is none."""
        slots = self._slots[block * self._block_size : (block + 1) * self._block_size]
        pairs = (slot or (b"", b"") for slot in slots)
        return b"".join(parent.ljust(16, b"\0") + state.ljust(16, b"\0") for parent, state in pairs)

    def write_block(self, block: int, content: bytes) -> None:
        """Overwrite a block with what :meth:`read_block` gave."""
        for at in range(self._block_size):
            pair = content[at * 32 : at * 32 + 32]
            parent, state = pair[:16], pair[16:]
            slot = None if not any(state) else (parent if any(parent) else b"", state)
            self._slots[block * self._block_size + at] = slot

    def _run_chunk(self, chunk: ScheduledChunk) -> list[bytes]:
        """The states after each of its tokens."""
        state = self._read_context(chunk)
        states: list[bytes] = []
        for at, token_id in zip(_positions(chunk), chunk.token_ids, strict=True):
            parent, state = state, advance(state, token_id)
            self._slots[self._slot(chunk, at)] = (parent, state)
            states.append(state)
        return states

    def _read_context(self, chunk: ScheduledChunk) -> bytes:
        state = b""
        for at in range(chunk.start):
            slot = self._slots[self._slot(chunk, at)]
            assert slot is not None, "KV that was never written is read"
            assert slot[0] == state, f"KV at position {at} of sequence {chunk.sequence_id} belongs elsewhere"
            state = slot[1]
        return state

    def _slot(self, chunk: ScheduledChunk, at: int) -> int:
        return chunk.block_table[at // self._block_size] * self._block_size + at % self._block_size


def advance(state: bytes, token_id: int) -> bytes:
    """The state of the model after one more token."""
    return blake2b(state + token_id.to_bytes(4, "little"), digest_size=16).digest()


def alone(
    prompt: Sequence[int], count: int, vocab_size: int = 50, stop: frozenset[int] = frozenset()
) -> list[int]:
    """What the model says after ``prompt`` when nobody else is there: at most ``count`` tokens."""
    state = b""
    for token_id in prompt:
        state = advance(state, token_id)
    generated: list[int] = []
    while len(generated) < count:
        token_id = int.from_bytes(state[:8], "little") % vocab_size
        generated.append(token_id)
        if token_id in stop:
            break
        state = advance(state, token_id)
    return generated


def _positions(chunk: ScheduledChunk) -> range:
    return range(chunk.start, chunk.start + len(chunk.token_ids))
