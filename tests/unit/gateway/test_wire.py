"""Paths, options, bodies and answers on both surfaces' wire."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.wire import ErrorBody, ErrorDetail, TokenUsage
from gateway.catalog import Catalog
from gateway.config import ServedModel
from gateway.errors import Reason, Refusal
from gateway.responses import format_neurons
from gateway.wire.openai import ChatBody, decode_chat, encode_usage, usage_of, with_usage
from gateway.wire.replica import decode_billing_context, decode_refusal
from gateway.wire.workers_ai import (
    RunOptions,
    RunTarget,
    affinity_of,
    encode_refusal,
    parse_target,
    session_label,
)

ROOT = "/client/v4/accounts/"


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("a/ai/run/@cf/x/y", RunTarget("a", "run", "@cf/x/y")),
        ("a/ai/run/@cf%2Fx%2Fy", RunTarget("a", "run", "@cf/x/y")),
        ("a/ai/run/%40cf%2Fx%2Fy", RunTarget("a", "run", "@cf/x/y")),
        ("a/ai/run", RunTarget("a", "run", None)),
        ("a/ai/run/", RunTarget("a", "run", None)),
        ("a/ai/v1/chat/completions", RunTarget("a", "v1", None)),
        ("a/ai/v1/embeddings", RunTarget("a", "embeddings", None)),
        ("a/ai/runs/x", None),
        ("a/ai/v1/models", None),
        ("a/ai/v1/chat/completions/", None),
        ("a/ai", None),
        ("a", None),
        ("", None),
        ("/ai/run/@cf/x/y", None),
    ],
)
def test_paths(path: str, target: RunTarget | None) -> None:
    assert parse_target(ROOT + path) == target


def test_paths_elsewhere() -> None:
    assert parse_target("/v1/chat/completions") == RunTarget("", "plain v1", None)
    assert parse_target("/v1/embeddings") == RunTarget("", "plain embeddings", None)
    assert parse_target("/v1/nothing") is None
    assert parse_target("/") is None
    assert parse_target("/run") == parse_target("/ai-gateway/run") == RunTarget("", "binding", None)
    assert parse_target("/run/") is None


def test_affinity_order() -> None:
    options = RunOptions(session_affinity="option", headers={"X-Session-Affinity": "nested"})
    assert affinity_of({"x-session-affinity": "header"}, options) == "header"
    assert affinity_of({"x-session-affinity": ""}, options) == "option"
    assert affinity_of({}, RunOptions(headers={"a": "b", "X-Session-Affinity": "nested"})) == "nested"
    assert affinity_of({}, RunOptions()) == affinity_of({}, None) == ""


def test_a_session_as_records_keep_it_is_bounded_and_printable() -> None:
    assert len(session_label("x" * 1000)) == 256
    assert session_label("a\x00b\tc\x7f d\u2028\ud800é") == "abc dé"
    assert session_label("\x00" * 10) == ""


def decode(**body: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | body
    return decode_chat(json.dumps(body).encode(), path_model=None, allows_prompt=True, max_choices=8)


def refusal_of(body: dict[str, Any]) -> Refusal | None:
    try:
        decode(**body)
    except Refusal as refusal:
        return refusal
    return None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from([*ChatBody.__struct_fields__, "x"])


@pytest.mark.slow
@given(body=st.dictionaries(FIELDS, JSON, max_size=6))
def test_any_json_object_is_decoded_or_refused(body: dict[str, Any]) -> None:
    """No input may end in anything but a request or a 400."""
    refusal = refusal_of(body)
    assert refusal is None or (refusal.reason.status == 400 and refusal.message)


@given(raw=st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(raw: bytes) -> None:
    with pytest.raises(Refusal):
        decode_chat(raw, path_model="m", allows_prompt=True, max_choices=8)


@pytest.mark.parametrize(
    ("stop", "strings"),
    [(None, []), ([], []), ("a", ["a"]), (["a", "b", "c", "d"], ["a", "b", "c", "d"])],
)
def test_stop(stop: Any, strings: list[str]) -> None:
    assert decode(stop=stop).stop == strings


def test_numbers_at_the_ends_of_their_ranges() -> None:
    chat = decode(
        temperature=2,
        top_p=0,
        frequency_penalty=-2,
        presence_penalty=2.0,
        top_logprobs=20,
        logprobs=True,
        n=8,
        logit_bias={"0": -100, "1": 100},
        seed=-(2**63),
        max_tokens=1,
    )
    assert chat.num_choices == 8
    assert chat.body.temperature == 2.0


def test_tool_choice_objects_without_tools_are_refused() -> None:
    with pytest.raises(Refusal, match="'/tool_choice'"):
        decode(tool_choice={"type": "function", "function": {"name": "f"}})


def test_usage_with_neurons_replaces_nothing_else() -> None:
    usage = encode_usage(TokenUsage.of(prompt=147, completion=16), 17_727)
    untouched = b'{"id":"x","choices":[{"text":"\\u00e9 1.0 1e3"}],"big":12345678901234567890'
    merged = with_usage(untouched + b',"usage":{}}', usage)
    assert merged.startswith(untouched)
    assert json.loads(merged)["usage"] == {
        "prompt_tokens": 147,
        "completion_tokens": 16,
        "total_tokens": 163,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "neurons": 1.7727,
    }
    assert usage_of(b'{"id":"x"}') is None


@given(neurons_e4=st.integers(0, 10**12))
def test_neurons_are_printed_exactly_and_plainly(neurons_e4: int) -> None:
    text = format_neurons(neurons_e4)
    assert "e" not in text
    whole, _, fraction = text.partition(".")
    assert int(whole) * 10_000 + int(fraction.ljust(4, "0") or 0) == neurons_e4


@pytest.mark.parametrize(("neurons_e4", "text"), [(0, "0"), (19_800, "1.98"), (1, "0.0001"), (100_000, "10")])
def test_neurons_as_the_header_has_them(neurons_e4: int, text: str) -> None:
    assert format_neurons(neurons_e4) == text


def test_both_error_envelopes_key_by_key() -> None:
    assert encode_refusal(Refusal(Reason.AUTHENTICATION, "Authentication error"), "id") == (
        b'{"result":null,"success":false,"errors":[{"code":10000,"message":"Authentication error"}],'
        b'"messages":[]}'
    )
    assert encode_refusal(Refusal(Reason.CAPACITY, "Full."), "id") == (
        b'{"errors":[{"message":"AiError: Full. (id)","code":3040}],"success":false,"result":{},'
        b'"messages":[]}'
    )


@pytest.mark.parametrize(
    ("status", "detail", "reason", "text"),
    [
        (400, ErrorDetail(message="too long", code="context_length_exceeded", param="messages"),
         Reason.CONTEXT_OVERFLOW, "too long"),
        (400, ErrorDetail(message="no such token", param="logit_bias.5"),
         Reason.BAD_INPUT, "Bad input: '/logit_bias/5': no such token"),
        (422, ErrorDetail(message="odd"), Reason.BAD_INPUT, "Bad input: odd"),
        (413, ErrorDetail(message="big"), Reason.TOO_LARGE, "big"),
        (408, ErrorDetail(message="slow"), Reason.TIMEOUT, "slow"),
    ],
)  # fmt: skip
def test_refusals_of_replicas(status: int, detail: ErrorDetail, reason: Reason, text: str) -> None:
    refusal = decode_refusal(status, msgspec.json.encode(ErrorBody(detail)))
    assert (refusal.reason, refusal.message) == (reason, text)


def test_a_replicas_refusal_that_cannot_be_read_is_a_400_all_the_same() -> None:
    assert decode_refusal(400, b"<html>").reason is Reason.BAD_INPUT


def test_billing_contexts_of_others_are_none() -> None:
    assert decode_billing_context("") is None
    assert decode_billing_context('{"account_id":1}') is None


def test_every_reason_has_a_word_of_its_own() -> None:
    assert len({reason.word for reason in Reason}) == len(Reason)


def test_a_catalog_refuses_names_that_two_models_claim() -> None:
    with pytest.raises(ValueError, match="'b' names both 'a' and 'b'"):
        Catalog([ServedModel(id="a", aliases=["b"]), ServedModel(id="b")])
    catalog = Catalog([ServedModel(id="a", aliases=["b"]), ServedModel(id="c")])
    assert catalog.names() == ["a", "b", "c"]
    assert catalog.find("b").id == "a"
    with pytest.raises(Refusal, match="No such model d or task"):
        catalog.find("d")
