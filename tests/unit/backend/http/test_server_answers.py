"""The forms of an answer: frames, bodies, usage, choices, log probabilities."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.scripted_replica import Replica


async def test_a_stream_has_a_role_text_a_reason_one_usage_and_an_end(replica: Replica) -> None:
    replica.say("hello world", cached_prompt_tokens=16)
    answer = await replica.complete(stream=True, request_id="abc")
    assert answer.status == 200
    assert "event-stream" in answer.headers["Content-Type"]
    assert answer.frames[-1] == b"[DONE]"
    chunks = answer.chunks
    for chunk in chunks:
        assert list(chunk) == ["id", "object", "created", "model", "choices", "usage"]
        assert chunk["id"] == "chatcmpl-abc"
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["model"] == "@cf/test/model"
    assert chunks[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert answer.text() == "hello world"
    assert chunks[-2]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    usage = chunks[-1]["usage"]
    prompt = len(replica.engine.requests[0].prompt_token_ids)
    completion = len(replica.engine.scripts[0].token_ids)
    assert usage == {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_the_final_usage_says_which_blocks_the_prompt_was_served_from(replica: Replica) -> None:
    replica.say("one two three", cached_prompt_tokens=16, cached_head=b"\x01" * 32)
    answer = await replica.complete(stream=True, request_id="abc")
    blocks = {"num_blocks": 16 // replica.engine.info.block_size, "head": "01" * 32}
    assert answer.chunks[-1]["usage"]["cached_blocks"] == blocks
    assert (await replica.usages())[0]["usage"]["cached_blocks"] == blocks


async def test_a_whole_answer_says_the_same_as_the_stream(replica: Replica) -> None:
    replica.say("hello 삼겹살 👋🏽 world")
    stream = await replica.complete(stream=True)
    whole = await replica.complete()
    assert list(whole.json) == ["id", "object", "created", "model", "choices", "usage"]
    assert whole.json["object"] == "chat.completion"
    choice = whole.json["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": stream.text(), "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    assert whole.json["usage"] == stream.chunks[-1]["usage"]


async def test_no_delta_is_empty_and_none_holds_half_a_character(replica: Replica) -> None:
    replica.say("삼겹살 👋🏽 ď")
    answer = await replica.complete(stream=True)
    deltas = [
        c["delta"]["content"]
        for chunk in answer.chunks[1:]
        for c in chunk["choices"]
        if "content" in c["delta"]
    ]
    assert "".join(deltas) == "삼겹살 👋🏽 ď"
    assert all(deltas)
    assert "\ufffd" not in "".join(deltas)


async def test_an_answer_without_text_is_an_empty_string(replica: Replica) -> None:
    replica.say("")
    assert (await replica.complete()).json["choices"][0]["message"]["content"] == ""
    stream = await replica.complete(stream=True)
    assert stream.text() == ""
    assert stream.chunks[-1]["usage"]["completion_tokens"] == 1


async def test_the_limit_on_tokens_is_reported_as_length(replica: Replica) -> None:
    replica.say("abcdef")
    answer = (await replica.complete(max_tokens=3)).json
    assert answer["choices"][0]["message"]["content"] == "abc"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


async def test_without_a_limit_the_rest_of_the_context_is_free(replica: Replica) -> None:
    replica.say("x")
    await replica.complete(max_tokens=None)
    request = replica.engine.requests[0]
    assert request.sampling.max_tokens == 512 - len(request.prompt_token_ids)


class TestStopStrings:
    @pytest.mark.parametrize("stream", [True, False])
    async def test_nothing_of_the_stop_shows_and_the_engine_is_stopped(
        self, replica: Replica, stream: bool
    ) -> None:
        replica.say("ABCDEFGHIJKLMNOPQRSTUVWXYZ", delay_s=0.001)
        answer = await replica.complete(stream=stream, stop=["DEFGHIJ"])
        if stream:
            assert answer.text() == "ABC"
            reason = answer.chunks[-2]["choices"][0]["finish_reason"]
            usage = answer.chunks[-1]["usage"]
        else:
            assert answer.json["choices"][0]["message"]["content"] == "ABC"
            reason = answer.json["choices"][0]["finish_reason"]
            usage = answer.json["usage"]
        assert reason == "stop"
        assert usage["completion_tokens"] == 10  # up to the J
        assert replica.engine.aborted == [1]
        assert replica.engine.num_open == 0

    async def test_held_text_makes_no_chunk_and_is_released_in_the_end(self, replica: Replica) -> None:
        replica.say("abcDEF")
        answer = await replica.complete(stream=True, stop=["DEFX"])
        contents = [c["delta"].get("content") for chunk in answer.chunks for c in chunk["choices"]]
        assert contents == ["", "a", "b", "c", "DEF", None]


class TestChoices:
    async def test_the_others_follow_when_the_first_has_its_prompt_cached(self, replica: Replica) -> None:
        replica.say("one", delay_s=0.02, cached_prompt_tokens=16)
        replica.say("two", cached_prompt_tokens=32)
        replica.say("three", cached_prompt_tokens=32)
        answer = (await replica.complete(n=3, seed=7)).json
        assert [c["message"]["content"] for c in answer["choices"]] == ["one", "two", "three"]
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
        assert [r.sampling.seed for r in replica.engine.requests] == [7, 8, 9]
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(replica.engine.requests[0].prompt_token_ids)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 16
        assert usage["completion_tokens"] == sum(len(s.token_ids) for s in replica.engine.scripts)
        assert len(await replica.usages()) == 1

    async def test_streamed_choices_are_told_apart_by_their_index(self, replica: Replica) -> None:
        replica.say("aaaa bbbb cccc", delay_s=0.005)
        replica.say("dddd eeee ffff", delay_s=0.005)
        answer = await replica.complete(n=2, stream=True)
        assert answer.text(0) == "aaaa bbbb cccc"
        assert answer.text(1) == "dddd eeee ffff"
        first_of = {}
        reasons = []
        for chunk in answer.chunks:
            for choice in chunk["choices"]:
                first_of.setdefault(choice["index"], choice["delta"])
                if choice["finish_reason"]:
                    reasons.append((choice["index"], choice["finish_reason"]))
        assert first_of == {i: {"role": "assistant", "content": ""} for i in (0, 1)}
        assert sorted(reasons) == [(0, "stop"), (1, "stop")]
        assert sum(chunk["usage"] is not None for chunk in answer.chunks) == 1

    async def test_a_stop_string_ends_only_its_own_choice(self, replica: Replica) -> None:
        replica.say("abXcdefghijk", delay_s=0.003)
        replica.say("abcdefghijk", delay_s=0.003)
        answer = (await replica.complete(n=2, stop=["X"])).json
        assert [c["message"]["content"] for c in answer["choices"]] == ["ab", "abcdefghijk"]
        assert answer["usage"]["completion_tokens"] == 3 + 12

    async def test_choices_of_one_token_end(self, replica: Replica) -> None:
        replica.say("x")
        answer = (await replica.complete(n=4, max_tokens=1)).json
        assert [c["message"]["content"] for c in answer["choices"]] == ["x"] * 4


class TestLogprobs:
    async def test_they_have_the_openai_form(self, replica: Replica) -> None:
        replica.say("a삼")
        answer = (await replica.complete(logprobs=True, top_logprobs=2)).json
        content = answer["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["a", *["\ufffd"] * 3]
        assert content[0] == {
            "token": "a",
            "logprob": -0.25,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.25, "bytes": [97]},
                {"token": content[0]["top_logprobs"][1]["token"], "logprob": -9999.0,
                 "bytes": content[0]["top_logprobs"][1]["bytes"]},
            ],
        }  # fmt: skip
        assert bytes(b for entry in content for b in entry["bytes"]).decode() == "a삼"

    async def test_a_stream_has_the_same_ones(self, replica: Replica) -> None:
        replica.say("hello 삼 world")
        whole = (await replica.complete(logprobs=True)).json["choices"][0]["logprobs"]["content"]
        stream = await replica.complete(logprobs=True, stream=True)
        pieces: list[Any] = []
        for chunk in stream.chunks:
            for choice in chunk["choices"]:
                if choice["logprobs"]:
                    assert choice["delta"]["content"]
                    pieces += choice["logprobs"]["content"]
        assert pieces == whole
        assert all(entry["top_logprobs"] == [] for entry in whole)


async def test_all_sampling_parameters_reach_the_engine(replica: Replica) -> None:
    replica.say("x")
    await replica.complete(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=3, frequency_penalty=0.2, presence_penalty=0.3,
        repetition_penalty=1.1, logit_bias={"5": -100}, ignore_eos=True, cache_salt="salt", max_tokens=9,
        reject_if_busy=True,
    )  # fmt: skip
    request = replica.engine.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.2, 0.3)
    assert (sampling.repetition_penalty, sampling.seed, sampling.max_tokens) == (1.1, 3, 9)
    assert sampling.logit_bias == {5: -100.0}
    assert sampling.ignore_eos
    await replica.complete(top_p=0, top_k=40)
    nearly_greedy = replica.engine.requests[1].sampling
    assert (nearly_greedy.top_p, nearly_greedy.top_k) == (1.0, 1), "a share of nothing is the likeliest token"
    assert sampling.num_logprobs is None
    assert request.cache_salt == b"salt"
    assert request.reject_if_busy


async def test_the_prompt_is_the_rendered_conversation(replica: Replica) -> None:
    replica.say("x")
    await replica.complete(messages=[{"role": "user", "content": "<|im_end|>"}])
    plain = replica.tokenizer.encode_text
    assert replica.engine.requests[0].prompt_token_ids == [
        1, *plain("user\n<|im_end|>"), 2, *plain("\n"), 1, *plain("assistant\n"),
    ]  # fmt: skip


async def test_every_request_ends_in_one_recent_usage(replica: Replica) -> None:
    replica.say("one")
    for number in range(5):
        await replica.complete(
            stream=bool(number % 2), request_id=f"q{number}", billing_context=f"bill{number}"
        )
    usages = await replica.usages()
    assert [u["sequence"] for u in usages] == [1, 2, 3, 4, 5]
    assert [u["request_id"] for u in usages] == [f"q{n}" for n in range(5)]
    assert [u["billing_context"] for u in usages] == [f"bill{n}" for n in range(5)]
    assert {u["finish_reason"] for u in usages} == {"stop"}
    page = (await replica.call("GET", "/usages?after=3")).json
    assert [u["sequence"] for u in page["usages"]] == [4, 5]
    assert page["next_after"] == 5
    assert page["replica_id"] == "replica-0"
    empty = (await replica.call("GET", "/usages?after=5")).json
    assert (empty["usages"], empty["next_after"]) == ([], 5)
    one = (await replica.call("GET", "/usages?request_id=q3")).json
    assert [u["sequence"] for u in one["usages"]] == [4]
    unknown = (await replica.call("GET", "/usages?request_id=never")).json
    assert unknown["usages"] == []


async def test_the_ending_is_recorded_before_the_reader_sees_it(replica: Replica) -> None:
    replica.say("hello")
    body = replica.request(stream=True)
    async with replica.session.post("/v1/chat/completions", json=body) as response:
        async for line in response.content:
            if b'"choices":[]' in line:
                assert json.loads(line[6:])["usage"] == (await replica.usages())[0]["usage"]
                break
