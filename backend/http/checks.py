"""The last look at whole answers that must meet a schema: good, or said to be not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from backend.http.chunks import Message
from backend.metrics import ReplicaMetrics
from backend.text.answer_check import BrokenSchemaError, UnjudgedError, check_answer
from backend.text.answer_rules import AnswerRules
from backend.text.grammar import arguments_schema
from backend.wire import ReplicaRequest

_log = logging.getLogger("backend.request")


class AnswerChecker:
    """Checks whole answers in a thread; :meth:`close` ends it.

    A mask that let a wrong answer through is a fault of this server. It is counted, logged by the keyword
    alone, and declared in the answer, whose ``finish_reason`` is then ``error``.

    Args:
        metrics: counts verdicts.
        max_steps: of one check, see :func:`backend.text.answer_check.check_answer`.
    """

    def __init__(self, metrics: ReplicaMetrics, *, max_steps: int) -> None:
        self._metrics = metrics
        self._max_steps = max_steps
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="check")

    async def check(self, messages: Sequence[Message], rules: AnswerRules, request: ReplicaRequest) -> None:
        """Look at the choices of one answer, and declare what is wrong with them."""
        can_be_cut = bool(request.stop)
        for message in messages:
            for schema, text, call_index in _promises(message, rules):
                loop = asyncio.get_running_loop()
                error = await loop.run_in_executor(self._thread, self._judge, schema, text, can_be_cut)
                if error is None:
                    continue
                _log.error(
                    "an answer does not meet its schema",
                    extra={"fields": {"request_id": request.request_id, "keyword": error.keyword}},
                )
                message.declare(str(error), call_index)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _judge(self, schema: Any, text: str, can_be_cut: bool) -> BrokenSchemaError | None:
        try:
            check_answer(schema, text, max_steps=self._max_steps)
        except BrokenSchemaError as error:
            if can_be_cut and not error.keyword:  # by a stop string of the request's own
                self._metrics.count_check("unjudged")
                return None
            self._metrics.count_check("broken")
            return error
        except UnjudgedError:
            self._metrics.count_check("unjudged")
        else:
            self._metrics.count_check("met")
        return None


def _promises(message: Message, rules: AnswerRules) -> list[tuple[Any, str, int | None]]:
    """Schema, text that must meet it, and which call's arguments that is; nothing of what was cut."""
    if rules.content is not None and message.finish_reason == "stop":
        return [(rules.content.schema, message.content, None)]
    strict = {tool.name: arguments_schema(tool.schema) for tool in rules.tools if tool.is_strict}
    if message.finish_reason != "tool_calls":
        return []
    return [
        (strict[name], arguments, index)
        for index, (name, arguments) in enumerate(message.calls)
        if name in strict and not message.has_failed(index)
    ]
