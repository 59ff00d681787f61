"""Success forms of both surfaces, streaming and not, as clients of Workers AI rely on them."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import ALIAS, EMBEDDINGS, MODEL, Harness

RUN = f"/run/{MODEL}"
NEURONS = 1.2909  # (12 - 4) x 54545 + 4 x 9091 + 3 x 272727, in millionths, to four decimals


async def test_native_answer_is_enveloped(gateway: Harness) -> None:
    reply = await gateway.chat(path=RUN)
    assert reply.status == 200
    assert list(reply.json) == ["result", "success", "errors", "messages"]
    assert reply.json["success"] is True
    assert reply.json["errors"] == reply.json["messages"] == []
    result = reply.json["result"]
    assert result["choices"][0]["message"]["content"] == "Hello, world"
    assert result["model"] == MODEL
    assert result["usage"] == {
        "prompt_tokens": 12,
        "completion_tokens": 3,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "neurons": NEURONS,
    }


async def test_openai_answer_is_bare(gateway: Harness) -> None:
    reply = await gateway.chat()
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json["object"] == "chat.completion"
    assert reply.json["choices"][0]["message"]["content"] == "Hello, world"
    assert reply.json["usage"]["neurons"] == NEURONS
    assert "result" not in reply.json


@pytest.mark.parametrize("path", ["/v1/chat/completions", RUN])
async def test_headers_name_request_neurons_ray_and_replica(gateway: Harness, path: str) -> None:
    reply = await gateway.chat(path=path)
    assert float(reply.headers["cf-ai-neurons"]) == NEURONS
    assert len(reply.headers["cf-ai-req-id"]) == 36
    assert reply.headers["cf-ray"]
    assert reply.headers["x-embergate-replica"] in ("replica-0", "replica-1")


async def test_encoded_and_raw_model_ids_reach_the_same_model(gateway: Harness) -> None:
    for model in (MODEL, MODEL.replace("/", "%2F"), MODEL.replace("/", "%2f"), quote(MODEL, safe="")):
        reply = await gateway.chat(path=f"/run/{model}")
        assert reply.status == 200, model
        assert reply.json["result"]["model"] == MODEL


async def test_an_alias_runs_and_names_the_model_behind_it(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    reply = await gateway.chat(path=f"/run/{ALIAS}")
    assert reply.json["result"]["model"] == MODEL
    records = await gateway.stopped_records()
    assert (records[0].model, records[0].requested_model) == (MODEL, ALIAS)


async def test_the_path_model_wins_over_the_body_and_the_generic_run_takes_it_from_there(
    gateway: Harness,
) -> None:
    assert (await gateway.chat(path=RUN, model="@cf/nobody/nothing")).status == 200
    assert (await gateway.chat(path="/run")).json["result"]["model"] == MODEL


async def test_native_accepts_a_prompt(gateway: Harness, replicas: list[FakeReplica]) -> None:
    reply = await gateway.post(RUN, {"prompt": "Say hello."})
    assert reply.status == 200
    (request,) = replicas[0].requests + replicas[1].requests
    assert request["messages"] == [{"role": "user", "content": "Say hello."}]


async def test_openai_surface_takes_no_prompt(gateway: Harness) -> None:
    reply = await gateway.post("/v1/chat/completions", {"model": MODEL, "prompt": "Say hello."})
    assert reply.status == 400
    assert "'/messages'" in reply.json["errors"][0]["message"]


async def test_native_stream_is_the_three_part_hybrid(gateway: Harness) -> None:
    reply = await gateway.chat(path=RUN, stream=True)
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, usage_chunk, tail, done = reply.frames
    assert reply.text == "Hello, world"
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["choices"] for chunk in chunks)
    assert usage_chunk["choices"] == []
    assert list(tail) == ["response", "usage"]
    assert tail["response"] == ""
    assert tail["usage"] == usage_chunk["usage"]
    assert tail["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert tail["usage"]["neurons"] == NEURONS
    assert done == "[DONE]"


async def test_native_stream_has_usage_whatever_stream_options_say(gateway: Harness) -> None:
    reply = await gateway.chat(path=RUN, stream=True, stream_options={"include_usage": False})
    assert reply.frames[-2]["usage"]["prompt_tokens"] == 12


async def test_openai_stream_is_pure_chunks(gateway: Harness) -> None:
    reply = await gateway.chat(stream=True)
    assert reply.text == "Hello, world"
    assert all(frame == "[DONE]" or frame["choices"] for frame in reply.frames)
    assert reply.frames[-1] == "[DONE]"
    assert reply.frames[-2]["choices"][0]["finish_reason"] == "stop"


async def test_openai_stream_has_one_usage_chunk_when_asked(gateway: Harness) -> None:
    """BR-94: whoever sums the usage of chunks must get the total once."""
    reply = await gateway.chat(stream=True, stream_options={"include_usage": True})
    with_usage = [frame for frame in reply.frames if frame != "[DONE]" and frame.get("usage")]
    assert len(with_usage) == 1
    assert with_usage[0] == reply.frames[-2]
    assert with_usage[0]["choices"] == []
    assert with_usage[0]["usage"]["neurons"] == NEURONS
    assert all("response" not in frame for frame in reply.frames if frame != "[DONE]")


async def test_cached_tokens_are_reported_on_a_miss_too(
    gateway: Harness, replicas: list[FakeReplica]
) -> None:
    """Complaint A1: always there, 0 on a miss."""
    for replica in replicas:
        replica.script.cached_tokens = 0
    streamed = await gateway.chat(path=RUN, stream=True)
    assert streamed.frames[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    plain = await gateway.chat()
    assert plain.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_chunks_are_forwarded_byte_for_byte(gateway: Harness, replicas: list[FakeReplica]) -> None:
    """Also text that looks like the words which end a stream."""
    tokens = ['say "usage"', " [DONE]", ' {"error": 1}', " data: x\n\n", " é", "\U0001f44b"]
    for replica in replicas:
        replica.script.tokens = tokens
    for path in (RUN, "/v1/chat/completions"):
        reply = await gateway.chat(path=path, stream=True)
        assert reply.text == "".join(tokens)
        assert reply.frames[-1] == "[DONE]"


async def test_model_list_is_an_extension(gateway: Harness) -> None:
    """Complaint G2."""
    reply = await gateway.get("/v1/models")
    assert reply.status == 200
    assert reply.json["object"] == "list"
    assert {model["id"] for model in reply.json["data"]} == {MODEL, ALIAS, EMBEDDINGS}


async def test_every_route_also_works_on_a_connection_that_aiohttp_took_over(gateway: Harness) -> None:
    """A connection that begins with another request is served by aiohttp; the answers are the same."""
    await gateway.get(gateway.root("/health"))
    for path in (RUN, "/v1/chat/completions"):
        streamed = await gateway.chat(path=path, stream=True)
        assert (streamed.text, streamed.frames[-1]) == ("Hello, world", "[DONE]")
        assert (await gateway.chat(path=path)).status == 200
