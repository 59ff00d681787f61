"""The sequences of one request, from admission to their counted end.

A request with ``n`` choices is ``n`` sequences of one prompt. Choice 0 goes first; the others follow when
its first token shows that the prompt's blocks are in the cache, so the prompt is computed once. It is
counted once too, with what was cached for choice 0.

Invariants: every sequence that was submitted is over, or asked to be, when :meth:`Generation.settle`
returns; counts never change after that. A stop string ends its sequence at once, and tokens that the engine
made beyond it are not counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from backend.engine.client import EngineDiedError, SequenceRefusedError
from backend.engine.messages import MediaSpan, SamplingParams, SequenceRequest, TokenLogprobs, TokenOutput
from backend.http.engine_port import Engine, TokenStream
from backend.text.output import ChoiceText
from backend.text.parts import OutputForm, Part
from backend.text.stop_strings import StopStrings
from backend.wire import CachedBlocks, FinishReason, TokenUsage


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """All that decides what is generated.

    ``lease_id``, ``told_cached_tokens``, ``was_admitted``: of a prompt that another replica computed, all or
    in part (:class:`backend.engine.messages.SequenceRequest`); it is owed when it was admitted there.
    """

    prompt_token_ids: list[int]
    sampling: SamplingParams
    media: tuple[MediaSpan, ...] = ()
    num_choices: int = 1
    stops: StopStrings | None = None
    form: OutputForm | None = None
    cache_salt: bytes = b""
    reject_if_busy: bool = False
    lease_id: int = 0
    told_cached_tokens: int | None = None
    was_admitted: bool = False


class GenerationFailedError(Exception):
    """The engine gave up on a sequence; the message says why."""


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """What is new of one choice, perhaps nothing; ``finish_reason`` on its last. ``num_tokens`` made it.

    It is ``text`` when the model's answers are plain text, ``parts`` when they have a form.
    """

    index: int
    text: str
    num_tokens: int
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None
    parts: list[Part] = []

    @property
    def is_visible(self) -> bool:
        """Whether a reader sees anything of it."""
        return bool(self.text or self.parts or self.finish_reason is not None)


class Generation:
    """Runs the choices of one request; read it with :meth:`next`, end it with :meth:`settle`.

    Args:
        plan: what to generate.
        engine: where.
        token_bytes: the tokenizer's table, for the choices' texts.

    Raises:
        SequenceRefusedError: when the engine has no room, even to wait.
        EngineDiedError: when the engine process is gone.
    """

    def __init__(self, plan: GenerationPlan, engine: Engine, token_bytes: Sequence[bytes]) -> None:
        self._plan = plan
        self._engine = engine
        self._token_bytes = token_bytes
        self._choices: list[_Choice] = []
        self._num_to_submit = plan.num_choices
        self._num_unfinished = 0
        self._merged: _MergedStreams | None = None
        self._is_aborted = False
        self._was_admitted = plan.was_admitted
        self.queue_wait_s = 0.0
        self._submit_next()

    @property
    def is_over(self) -> bool:
        """Whether the last delta of every choice has been read."""
        return self._num_unfinished == 0 and self._num_to_submit == 0

    @property
    def usage(self) -> TokenUsage:
        """Counts so far; final once :attr:`is_over` or settled."""
        # A request that left the queue before its first step has computed nothing and owes nothing.
        prompt = len(self._plan.prompt_token_ids) if self._was_admitted else 0
        stream = self._choices[0].stream
        told = self._plan.told_cached_tokens
        cached = min(prompt, stream.cached_prompt_tokens if told is None else told)
        return TokenUsage.of(
            prompt=prompt,
            completion=sum(choice.num_tokens for choice in self._choices),
            cached=cached,
            cached_blocks=self._cached_blocks(cached, stream.cached_head),
            reasoning=sum(choice.text.num_reasoning_tokens for choice in self._choices),
            image=sum(span.num_tokens for span in self._plan.media) if self._was_admitted else 0,
        )

    def _cached_blocks(self, cached: int, head: bytes) -> CachedBlocks | None:
        if not cached or not head:
            return None
        return CachedBlocks(num_blocks=cached // self._engine.info.block_size, head=head.hex())

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """How each choice ended; "abort" for those that were stopped."""
        return [choice.text.finish_reason or "abort" for choice in self._choices]

    @property
    def finish_reason(self) -> FinishReason:
        """How the request as a whole ended: as its first choice did, unless it was stopped."""
        return "abort" if self._is_aborted else self.finish_reasons[0]

    async def next(self) -> Delta:
        """Wait for new text of any choice. Not to be called when :attr:`is_over`.

        Raises:
            SequenceRefusedError: the engine did not admit the request (or, later, one of its choices).
            GenerationFailedError: the engine gave up on a sequence.
            EngineDiedError: the engine process is gone.
        """
        if self._merged is not None:
            choice, output = await self._merged.take()
            while choice.text.finish_reason is not None:  # made beyond a stop string
                choice, output = await self._merged.take()
        else:
            choice = self._choices[0]
            output = await choice.stream.__anext__()
            self._note(output)
        delta = self._read(choice, output)
        if self._num_to_submit:
            self._submit_others()
        return delta

    def abort(self) -> None:
        """Ask the engine to stop every sequence; reading on gives their ends, with reason "abort"."""
        if self.is_over:
            return
        self._is_aborted = True
        self._num_to_submit = 0
        for choice in self._choices:
            if choice.text.finish_reason is None:
                choice.stream.abort()

    async def settle(self, timeout_s: float) -> None:
        """Stop whatever runs and wait for the engine's last word on it, so that the counts are final.

        Args:
            timeout_s: after so long the counts stay at what has arrived.
        """
        self.abort()
        if self._merged is not None:
            self._merged.close()
        try:
            async with asyncio.timeout(timeout_s):
                for choice in self._choices:
                    if choice.text.finish_reason is None:
                        await self._read_to_end(choice.stream)
        except TimeoutError:
            return

    def _submit_next(self) -> None:
        index = len(self._choices)
        sampling = self._plan.sampling
        if index and sampling.seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + index)
        request = SequenceRequest(
            sequence_id=self._engine.new_sequence_id(),
            prompt_token_ids=self._plan.prompt_token_ids,
            sampling=sampling,
            cache_salt=self._plan.cache_salt,
            media=self._plan.media,
            reject_if_busy=self._plan.reject_if_busy and index == 0,
            told_cached_tokens=self._plan.told_cached_tokens if index == 0 else None,
            lease_id=self._plan.lease_id if index == 0 else 0,
        )
        stream = self._engine.submit(request)
        form = self._plan.form
        parser = None if form is None else form.new_parser()
        text = ChoiceText(self._token_bytes, self._plan.stops, parser)
        self._choices.append(_Choice(index, stream, text))
        self._num_to_submit -= 1
        self._num_unfinished += 1

    def _submit_others(self) -> None:
        while self._num_to_submit:
            self._submit_next()
        running = [choice for choice in self._choices if choice.text.finish_reason is None]
        self._merged = _MergedStreams(running)

    def _read(self, choice: _Choice, output: TokenOutput) -> Delta:
        if output.finish_reason == "error":
            raise GenerationFailedError(output.message)
        text = choice.text
        num_before = text.num_tokens
        shown = text.push(output)
        if text.finish_reason is not None:
            self._num_unfinished -= 1
            if output.finish_reason is None:  # a stop string, which the engine knows nothing of
                choice.stream.abort()
        num_tokens = text.num_tokens - num_before
        if self._plan.form is None:
            logprobs = text.take_logprobs() if output.logprobs is not None else []
            return Delta(choice.index, shown, num_tokens, logprobs, text.finish_reason)
        parts = text.take_parts()
        # Those of the model's own marks wait for something that is shown.
        is_visible = bool(parts or text.finish_reason is not None)
        logprobs = text.take_logprobs() if output.logprobs is not None and is_visible else []
        return Delta(choice.index, "", num_tokens, logprobs, text.finish_reason, parts)

    def _note(self, output: TokenOutput) -> None:
        """Learn from choice 0 whether, and after how long, the request was admitted."""
        if not self.queue_wait_s and (output.token_ids or output.queue_wait_s > 0):
            self._was_admitted = True
            self.queue_wait_s = output.queue_wait_s

    async def _read_to_end(self, stream: TokenStream) -> None:
        try:
            while True:
                output = await stream.__anext__()
                if stream is self._choices[0].stream:
                    self._note(output)
        except (StopAsyncIteration, SequenceRefusedError, EngineDiedError):
            return


@dataclass(slots=True)
class _Choice:
    index: int
    stream: TokenStream
    text: ChoiceText

    @property
    def num_tokens(self) -> int:
        """Completion tokens: those of the text when it came to its end, or else all that arrived."""
        if self.text.finish_reason is not None:
            return self.text.num_tokens
        return self.stream.num_generated_tokens


class _MergedStreams:
    """Several streams read as one, in the order of arrival.

    One output waits at a time; behind it the streams themselves join what comes for a slow reader.
    """

    def __init__(self, choices: Sequence[_Choice]) -> None:
        self._queue: asyncio.Queue[tuple[_Choice, TokenOutput | Exception]] = asyncio.Queue(maxsize=1)
        self._tasks = [asyncio.create_task(self._pump(choice)) for choice in choices]

    async def take(self) -> tuple[_Choice, TokenOutput]:
        choice, output = await self._queue.get()
        if isinstance(output, Exception):
            raise output
        return choice, output

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _pump(self, choice: _Choice) -> None:
        try:
            while True:
                output = await choice.stream.__anext__()
                await self._queue.put((choice, output))
                if output.finish_reason is not None:
                    return
        except (SequenceRefusedError, EngineDiedError) as error:
            await self._queue.put((choice, error))
