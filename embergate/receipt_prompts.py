"""From a request as a client sent it to the prompt's tokens, as a replica derives them: to check receipts."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.sequence import Sequence
from backend.http.prompts import conversation_of
from backend.text.media import ImageLimits
from backend.text.messages import BadMessageError
from backend.text.model_text import ModelTextError, load_model_text
from backend.text.prompt import Prompt
from backend.wire import ReplicaRequest
from billing.receipts import Receipt, prompt_problems
from embergate.refusal import Refusal
from gateway.config import ServedModel
from gateway.errors import Refusal as RequestRefusal
from gateway.wire.completions import decode_completions
from gateway.wire.openai import ChatRequest, decode_chat
from gateway.wire.replica import encode_request
from gateway.wire.responses import decode_responses

_MAX_CHOICES = 1 << 20


def check_prompt(receipt: Receipt, request_body: bytes, model_dir: Path) -> list[str]:
    """What a receipt says that the request does not bear out.

    Args:
        request_body: the JSON body of a request for chat, a response or a completion, as it was sent.
            Images must be in it, not elsewhere.
        model_dir: the model's tokenizer and chat template.

    Raises:
        Refusal: the body or the tokenizer cannot be used.
    """
    prompt = _prompt_of(_as_replicas_get_it(request_body, receipt), model_dir)
    extras: dict[int, bytes] = {}
    if receipt.cache is not None and prompt.media:
        sequence = Sequence(
            SequenceRequest(
                sequence_id=0,
                prompt_token_ids=prompt.token_ids,
                sampling=SamplingParams(max_tokens=1),
                media=prompt.media,
            )
        )
        size = receipt.cache.block_size
        extras = {index: sequence.extra_of_block(index, size) for index in range(receipt.cache.num_blocks)}
    return prompt_problems(receipt, prompt.token_ids, extras)


def _as_replicas_get_it(body: bytes, receipt: Receipt) -> ReplicaRequest:
    try:
        chat = _chat_of(body, receipt.requested_model)
    except RequestRefusal as refusal:
        raise Refusal(f"the request cannot be read: {refusal.message}") from refusal
    encoded = encode_request(
        chat,
        ServedModel(id=receipt.model),
        messages=chat.messages,
        request_id=receipt.request_id,
        cache_salt="",
        billing_context="",
        account_id="",
    )
    return msgspec.json.decode(encoded, type=ReplicaRequest)


def _chat_of(body: bytes, requested_model: str) -> ChatRequest:
    """The conversation of any body that a chat model answers: only responses have an input and no messages,
    only legacy completions a list as their prompt. Raises RequestRefusal.
    """
    try:
        fields = json.loads(body)
    except ValueError:
        fields = None  # the full decoding says what is wrong
    if isinstance(fields, dict) and fields.get("messages") is None:
        if fields.get("input") is not None:
            return decode_responses(body)
        if isinstance(fields.get("prompt"), list):
            return decode_completions(body, max_choices=_MAX_CHOICES)
    return decode_chat(body, path_model=requested_model, allows_prompt=True, max_choices=_MAX_CHOICES)


def _prompt_of(request: ReplicaRequest, model_dir: Path) -> Prompt:
    try:
        text = load_model_text(
            model_dir, cache_chars=0, vocab_size=_vocab_size(model_dir), image_limits=ImageLimits()
        )
        return text.encode(conversation_of(request))
    except (ModelTextError, BadMessageError, OSError) as error:
        raise Refusal(f"the prompt cannot be derived: {error}") from error


def _vocab_size(model_dir: Path) -> int:
    """As the checkpoint states it; 0, for as many as the tokenizer names, where there is no checkpoint."""
    path = model_dir / "config.json"
    if not path.exists():
        return 0
    config = json.loads(path.read_text(encoding="utf-8"))
    stated = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0
    return int(stated)
