"""From a conversation to prompt tokens, never in the way of the streams of others.

A short conversation is rendered and encoded on the spot. A longer one goes to a thread of its own, one at a
time: encoding releases the interpreter lock, so the event loop goes on meanwhile. Those that hold images have
another thread, as an image can take as long as a very long text.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from backend.http.errors import bad_request, refused, unsupported
from backend.text.answer_rules import AnswerRules
from backend.text.grammar_compiler import BadGrammarError, CompilerBusyError, GrammarCompiler
from backend.text.media import may_hold_media
from backend.text.messages import BadMessageError
from backend.text.prompt import Conversation, ModelText, Prompt
from backend.wire import ReplicaRequest


class PromptEncoder:
    """Encodes the prompts of one replica; :meth:`close` ends its threads.

    Args:
        text: the model's text side.
        grammars: compiles what answers are held to.
        max_inline_chars: a longer request is encoded in the thread.
    """

    def __init__(self, text: ModelText, grammars: GrammarCompiler, *, max_inline_chars: int) -> None:
        self.text = text
        self._grammars = grammars
        self._max_inline_chars = max_inline_chars
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")
        self._image_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="images")

    async def encode(self, request: ReplicaRequest, num_body_bytes: int) -> Prompt:
        """The request's prompt; ``num_body_bytes`` bounds how long the conversation can be.

        Raises:
            ReplicaError: 400 naming the field, when the conversation cannot be rendered.
        """
        if request.tools and request.tool_choice != "none" and not self.text.can_call_tools:
            raise unsupported(
                "tools",
                "this model does not support tool calling; leave tools out or send 'tool_choice': 'none'",
            )
        try:
            has_media = may_hold_media(request.messages)
            if num_body_bytes <= self._max_inline_chars and not has_media:
                return self._encode(request)
            thread = self._image_thread if has_media else self._thread
            return await asyncio.get_running_loop().run_in_executor(thread, self._encode, request)
        except BadMessageError as error:
            raise bad_request(error.param, str(error), error.code) from error

    async def grammar(self, rules: AnswerRules, prompt: Prompt) -> str:
        """The grammar of an answer to ``prompt``; empty when it may be anything.

        Raises:
            ReplicaError: 400 naming the field and the keyword that no grammar can be made of, 429 when too
                many wait for theirs.
        """
        if rules.is_free:
            return ""
        try:
            return await self._grammars.compile(rules, reasoning_end=prompt.reasoning_end)
        except BadGrammarError as error:
            raise bad_request(error.param, str(error), "unsupported_schema") from error
        except CompilerBusyError as error:
            raise refused("queue_full", "too many requests wait for their JSON schemas") from error

    def close(self) -> None:
        self._grammars.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._image_thread.shutdown(wait=False, cancel_futures=True)

    def _encode(self, request: ReplicaRequest) -> Prompt:
        return self.text.encode(conversation_of(request))


def conversation_of(request: ReplicaRequest) -> Conversation:
    """What of a request decides its prompt."""
    options = dict(request.chat_template_kwargs)
    if request.reasoning_effort is not None:
        options.setdefault("reasoning_effort", request.reasoning_effort)
    return Conversation(
        messages=request.messages,
        tools=request.tools if request.tool_choice != "none" else (),
        options=options,
        thinking=request.thinking,
        allows_parallel_calls=request.parallel_tool_calls,
        cache_salt=request.cache_salt,
    )
