"""``POST /v1/chat/completions``: decode, encode the prompt, generate, answer.

Whatever can be refused is refused before the response begins, so a refusal has its true status with
``stream: true`` too.
"""

from __future__ import annotations

import asyncio
from functools import partial

from aiohttp import web

from backend.config import BackendConfig
from backend.engine.client import EngineDiedError, SequenceRefusedError
from backend.http.answers import as_replica_error, send_stream, send_whole
from backend.http.calls import Call, Calls, error_word
from backend.http.checks import AnswerChecker
from backend.http.demands import read_demands
from backend.http.engine_port import Engine
from backend.http.errors import ReplicaError
from backend.http.generation import Delta, Generation, GenerationFailedError, GenerationPlan
from backend.http.prefill import Prefill, read_place
from backend.http.prompts import PromptEncoder
from backend.http.requests import (
    check_media,
    check_request,
    choose_max_tokens,
    compile_stops,
    decode_request,
    sampling_params,
)
from backend.http.state import ReplicaState
from backend.telemetry import Telemetry
from backend.text.answer_rules import AnswerRules
from backend.wire import ReplicaRequest


class Completions:
    """The handler of chat completions of one replica."""

    def __init__(
        self,
        config: BackendConfig,
        state: ReplicaState,
        calls: Calls,
        checker: AnswerChecker,
        telemetry: Telemetry,
    ) -> None:
        self._config = config
        self._state = state
        self._calls = calls
        self._checker = checker
        self._telemetry = telemetry

    async def handle(self, http: web.Request) -> web.StreamResponse:
        """Serve one request.

        Raises:
            ReplicaError: a refusal or a failure, while no byte of an answer has left.
        """
        engine, prompts = self._state.serving()
        body = await http.read()
        request = decode_request(body)
        check_request(request, self._config)
        rules = read_demands(request)
        place, prefill = read_place(http), None
        call = self._open(request, http, engine)
        try:
            plan = await self._plan(request, rules, len(body), engine, prompts)
            if place is not None and (fetcher := self._state.fetcher) is not None:
                prefill = Prefill(fetcher, plan)
                await prefill.run(call, place)
                plan = prefill.plan
            first = await self._begin(call, plan, engine, prompts)
            table = prompts.text.token_bytes
            if request.stream:
                stall_s = self._config.max_write_stall_s
                return await send_stream(http, call, first, self._calls, table, max_stall_s=stall_s)
            check = partial(self._checker.check, rules=rules, request=request)
            return await send_whole(http, call, first, self._calls, table, check=check)
        except asyncio.CancelledError:  # the reader has gone
            if prefill is not None and prefill.was_admitted and call.generation is None:
                call.generation = Generation(prefill.plan, engine, prompts.text.token_bytes)  # to be recorded
            raise
        except BaseException as error:
            call.error = error_word(error)
            raise
        finally:
            self._calls.close(call)
            if prefill is not None:
                prefill.close()

    def _open(self, request: ReplicaRequest, http: web.Request, engine: Engine) -> Call:
        span = self._telemetry.start_request(request, http.headers)
        info = engine.info
        try:
            return self._calls.open(request, span, info.max_running + info.max_waiting)
        except ReplicaError as error:
            span.end(None, [], error=error_word(error), first_token_s=None, duration_s=0.0)
            raise

    async def _plan(
        self,
        request: ReplicaRequest,
        rules: AnswerRules,
        num_body_bytes: int,
        engine: Engine,
        prompts: PromptEncoder,
    ) -> GenerationPlan:
        info = engine.info
        prompt = await prompts.encode(request, num_body_bytes)
        check_media(request, prompt.media, self._config.text)
        max_tokens = choose_max_tokens(request, len(prompt.token_ids), info)
        grammar = await prompts.grammar(rules, prompt)
        return GenerationPlan(
            prompt_token_ids=prompt.token_ids,
            sampling=sampling_params(request, max_tokens, info, prompts.text.stop_token_ids, grammar),
            media=prompt.media,
            num_choices=request.n,
            stops=compile_stops(request),
            form=prompt.form,
            cache_salt=request.cache_salt.encode(),
            reject_if_busy=request.reject_if_busy,
        )

    async def _begin(self, call: Call, plan: GenerationPlan, engine: Engine, prompts: PromptEncoder) -> Delta:
        """Submit the request and wait for its first delta."""
        try:
            call.generation = Generation(plan, engine, prompts.text.token_bytes)
            if call.is_aborted:
                call.generation.abort()
            return await self._calls.next(call)
        except (SequenceRefusedError, GenerationFailedError, EngineDiedError) as error:
            if isinstance(error, SequenceRefusedError):
                call.generation = None  # never admitted: there is nothing to record
            raise as_replica_error(error) from error
