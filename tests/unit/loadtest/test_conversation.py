"""The simulated agent's conversation and its reading of a stream."""

from __future__ import annotations

import json

from loadtest.conversation import Answer, Conversation


def frame(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode()


def test_a_conversation_grows_without_changing_its_beginning() -> None:
    conversation = Conversation(seed=7, num_turns=2)
    first = list(conversation.messages)
    conversation.hear("Read the file.")
    assert conversation.messages[: len(first)] == first
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant", "user"]
    assert not conversation.is_over
    conversation.hear("Done.")
    assert conversation.is_over


def test_a_seed_makes_the_same_conversation_again() -> None:
    one, two, other = Conversation(1, 2), Conversation(1, 2), Conversation(2, 2)
    for conversation in (one, two, other):
        conversation.hear("ok")
    assert one.messages == two.messages
    assert one.affinity == two.affinity
    assert one.messages != other.messages
    assert one.affinity != other.affinity


def test_an_answer_is_read_piece_by_piece() -> None:
    answer = Answer()
    answer.read(frame(choices=[{"delta": {"role": "assistant", "content": ""}}]))
    assert answer.num_pieces == 0
    answer.read(frame(choices=[{"delta": {"content": "Par"}}]))
    answer.read(b"")
    answer.read(frame(choices=[{"delta": {"content": "is"}}]))
    assert answer.problem == "the stream ended without [DONE]"
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
    answer.read(frame(choices=[], usage=usage))
    answer.read(b"data: [DONE]")
    assert (answer.text, answer.prompt_tokens, answer.cached_tokens, answer.problem) == ("Paris", 9, 8, "")
    assert answer.num_pieces == 2


def test_thoughts_and_tool_calls_are_pieces_of_an_answer_too() -> None:
    answer = Answer()
    answer.read(frame(choices=[{"delta": {"reasoning_content": "Hm", "reasoning": "Hm"}}]))
    answer.read(frame(choices=[{"delta": {"tool_calls": [{"index": 0, "function": {"name": "search"}}]}}]))
    answer.read(frame(choices=[{"delta": {}, "finish_reason": "tool_calls"}]))
    assert (answer.num_pieces, answer.text) == (2, "")


def test_a_stream_without_usage_or_with_an_error_is_a_problem() -> None:
    answer = Answer()
    answer.read(b"data: [DONE]")
    assert answer.problem == "the stream has no usage"
    answer.read(frame(error={"message": "the replica is gone"}))
    assert answer.problem == "error in the stream: the replica is gone"
