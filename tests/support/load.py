"""A bounded load in which every complete answer has a known length, so that a short one cannot hide."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.support.chat import ChatClient, Outcome
from tests.support.installation import ALIAS, Installation


class Load:
    """``num_users`` ask one question after the other until told to stop, or ``max_requests`` are made.

    With ``ignore_eos`` an answer has exactly ``max_tokens`` tokens: a clean end with fewer is a lie.
    """

    def __init__(
        self, installation: Installation, num_users: int, max_tokens: int, max_requests: int = 400
    ) -> None:
        self._installation = installation
        self._num_users = num_users
        self._max_tokens = max_tokens
        self._num_left = max_requests
        self._stopping = asyncio.Event()
        self.outcomes: list[Outcome] = []

    async def run(self) -> list[Outcome]:
        """All outcomes, after the last answer."""
        async with ChatClient(self._installation.account, timeout_s=60) as client:
            await asyncio.gather(*(self._use(client, user) for user in range(self._num_users)))
        return self.outcomes

    def stop(self) -> None:
        """Let each user end the request in flight and then leave."""
        self._stopping.set()

    def count(self, is_so: Callable[[Outcome], bool]) -> int:
        """How many outcomes so far are as asked."""
        return sum(map(is_so, self.outcomes))

    def lies(self) -> list[Outcome]:
        """Answers that look whole and are not."""
        return [
            outcome
            for outcome in self.outcomes
            if outcome.is_complete and outcome.completion_tokens != self._max_tokens
        ]

    async def _use(self, client: ChatClient, user: int) -> None:
        turn = 0
        while not self._stopping.is_set() and self._num_left > 0:
            self._num_left -= 1
            turn += 1
            outcome = await client.complete(
                ALIAS,
                [{"role": "user", "content": f"User {user}, question {turn}: count upwards from {turn}."}],
                session=f"load-{user}",
                stream=True,
                temperature=0,
                max_tokens=self._max_tokens,
                ignore_eos=True,
            )
            self.outcomes.append(outcome)
            if not outcome.is_complete:
                await asyncio.sleep(0.2)
