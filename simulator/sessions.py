"""Simulated agents: sessions that come at random, and resend a prompt that grows with every turn."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

from simulator.requests import SimulatedRequest

_DIGEST = struct.Struct(">qI")


@dataclass(frozen=True, slots=True)
class SessionShape:
    """What a session looks like. Lengths in tokens, times in seconds; ``mean_`` values are means.

    The shared beginning (an agent's system prompt and tools) is the same in all sessions of an account. Turns
    are geometric, lengths and thinking times exponential around their means.

    Raises:
        ValueError: naming the value that makes no sense.
    """

    num_sessions: int
    sessions_per_s: float
    shared_tokens: int = 4096
    mean_first_tokens: int = 2048
    mean_turns: float = 8.0
    mean_turn_tokens: int = 1024
    mean_output_tokens: int = 256
    mean_think_s: float = 10.0
    max_prompt_tokens: int = 131_072
    block_tokens: int = 512
    num_accounts: int = 100

    def __post_init__(self) -> None:
        for name in ("num_sessions", "mean_output_tokens", "block_tokens", "num_accounts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.sessions_per_s <= 0:
            raise ValueError(f"sessions_per_s: must be positive, not {self.sessions_per_s}")
        if self.mean_turns < 1:
            raise ValueError(f"mean_turns: must be at least 1, not {self.mean_turns}")


@dataclass(slots=True)
class _Session:
    number: int
    digests: list[bytes]
    num_tokens: int


class SessionWorkload:
    """Sessions, closed loop: a turn follows the answer before it, after a pause for thought."""

    def __init__(self, shape: SessionShape, seed: int) -> None:
        self._shape = shape
        self._random = random.Random(seed)
        self._num_started = 0
        self._num_requests = 0
        self._clock_s = 0.0
        self._open: dict[str, _Session] = {}
        num_shared = shape.shared_tokens // shape.block_tokens
        self._shared = [
            [_DIGEST.pack(-1 - account, index) for index in range(num_shared)]
            for account in range(shape.num_accounts)
        ]

    @property
    def block_tokens(self) -> int:
        return self._shape.block_tokens

    @property
    def num_open(self) -> int:
        """Sessions that have begun and not ended."""
        return len(self._open)

    def next_arrival(self) -> SimulatedRequest | None:
        """The first turn of the next session."""
        if self._num_started >= self._shape.num_sessions:
            return None
        shape, number = self._shape, self._num_started
        self._num_started += 1
        self._clock_s += self._random.expovariate(shape.sessions_per_s)
        session = _Session(number, list(self._shared[number % shape.num_accounts]), shape.shared_tokens)
        key = f"ses_{number}"
        self._open[key] = session
        return self._turn(key, session, self._clock_s, self._length(shape.mean_first_tokens), is_later=False)

    def next_turn(self, answered: SimulatedRequest, now_s: float) -> SimulatedRequest | None:
        """What the session says to an answer, or None when that was its last turn."""
        shape = self._shape
        session = self._open[answered.key]
        is_over = self._random.random() < 1.0 / shape.mean_turns
        if is_over or session.num_tokens >= shape.max_prompt_tokens:
            del self._open[answered.key]
            return None
        pause = self._random.expovariate(1.0 / shape.mean_think_s) if shape.mean_think_s > 0 else 0.0
        num_new = self._length(shape.mean_turn_tokens)
        return self._turn(answered.key, session, now_s + pause, num_new, is_later=True)

    def _turn(
        self, key: str, session: _Session, at_s: float, num_new: int, *, is_later: bool
    ) -> SimulatedRequest:
        shape = self._shape
        output = self._length(shape.mean_output_tokens)
        prompt = session.num_tokens + num_new
        session.num_tokens = prompt + output
        num_full = session.num_tokens // shape.block_tokens
        for index in range(len(session.digests), num_full):
            session.digests.append(_DIGEST.pack(session.number, index))
        self._num_requests += 1
        return SimulatedRequest(
            index=self._num_requests - 1,
            arrival_s=at_s,
            account=f"account-{session.number % shape.num_accounts}",
            key=key,
            digests=session.digests[:num_full],
            prompt_tokens=prompt,
            output_tokens=output,
            is_opening=not is_later,
        )

    def _length(self, mean: int) -> int:
        return max(1, round(self._random.expovariate(1.0 / mean))) if mean > 0 else 0
