"""Ids of tool calls: ``functions.NAME:IDX``, with IDX counting every call of the conversation from 0.

The prompt shows the model a call's id and nothing else of the call's name, so the native form matters. It is
also unique over the conversation, which clients need; models and clients that number each turn from 0, or
that issue ids of their own, are brought back to it here.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

_NATIVE: Final = re.compile(r"functions\.(?P<name>.+):(?P<index>\d{1,15})", re.DOTALL)


def native_id(name: str, index: int) -> str:
    return f"functions.{name}:{index}"


def next_index(messages: Sequence[Mapping[str, Any]]) -> int:
    """The number of the next call: above all that the conversation's own ids have, and above their count.

    A client may have dropped the beginning of a long conversation, whose ids it still knows.
    """
    highest = num_calls = 0
    for message in messages:
        for call in message.get("tool_calls") or ():
            num_calls += 1
            found = _NATIVE.fullmatch(str(call.get("id") or ""))
            if found:
                highest = max(highest, int(found["index"]) + 1)
    return max(highest, num_calls)


class CallIdRenamer:
    """Gives the calls of a conversation, read in order, their native ids; finds those that results answer."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._by_given_id: dict[str, deque[str]] = {}
        self._unanswered: dict[str, str] = {}  # native id -> name, oldest first

    def begin_turn(self) -> None:
        """The calls that follow belong to another message: their ids may be ones that were used before."""
        self._unanswered.clear()

    def name_call(self, given_id: str, name: str) -> str:
        """The native id of the next call."""
        native = native_id(name, self._num_calls)
        self._num_calls += 1
        queue = self._by_given_id.get(given_id)
        if queue is None or queue[0] not in self._unanswered:
            queue = self._by_given_id[given_id] = deque()
        queue.append(native)
        self._unanswered[native] = name
        return native

    def name_result(self, given_id: str, name: str) -> str:
        """The native id of the call that a result answers.

        Args:
            given_id: the id that the result has; without one, the oldest call without an answer is meant.
            name: the function's name, when the result has it.

        Returns:
            ``given_id`` itself when no call had it.
        """
        if not given_id:
            named = [native for native, known in self._unanswered.items() if not name or known == name]
            native = named[0] if named else ""
        else:
            queue = self._by_given_id.get(given_id)
            if queue is None:
                return given_id
            # Several calls of one message with the same id are answered in their order.
            native = queue.popleft() if len(queue) > 1 else queue[0]
        self._unanswered.pop(native, None)
        return native
