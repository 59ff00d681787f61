"""Looking up from a long step."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf

from backend.engine.sequence import Sequence


class Watch:
    """Looks up from a step now and then, and ends it when all its sequences have ended.

    ``failure`` is what looking up raised; it must not pass for a failure of the model.
    """

    def __init__(self, sequences: ListOf[Sequence], look_up: Callable[[], None]) -> None:
        self.failure: Exception | None = None
        self._sequences = sequences
        self._look_up = look_up

    def should_stop(self) -> bool:
        try:
            self._look_up()
        except Exception as error:  # noqa: BLE001  whatever it is, the engine raises it after the step
            self.failure = error
            return True
        return all(sequence.finish_reason is not None for sequence in self._sequences)
