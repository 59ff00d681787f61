"""Scenarios grow without changing what was said, and thresholds judge the statistics."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from loadtest.conversation import Answer
from loadtest.scenarios import AgentTalk, ChatTalk, ImageTalk, SummaryTalk, Talk, ToolTalk
from loadtest.thresholds import Thresholds

TALKS = [AgentTalk, ChatTalk, SummaryTalk, ToolTalk, ImageTalk]


def said(text: str) -> Answer:
    answer = Answer()
    answer.text = text
    return answer


@pytest.mark.parametrize("make", TALKS)
def test_a_talk_grows_by_its_turns_and_keeps_its_beginning(make: Callable[[int, int], Talk]) -> None:
    talk = make(7, 3)
    bodies = []
    while not talk.is_over:
        bodies.append(json.loads(json.dumps(talk.body())))
        talk.hear(said("An answer."))
        assert len(bodies) < 9
    assert len(bodies) == (1 if make is SummaryTalk else 3)
    for earlier, later in itertools.pairwise(bodies):
        beginning = earlier["messages"]
        assert later["messages"][: len(beginning)] == beginning
        assert len(later["messages"]) > len(beginning)


@pytest.mark.parametrize("make", TALKS)
def test_a_seed_makes_the_same_talk_and_another_one_another(make: Callable[[int, int], Talk]) -> None:
    assert make(7, 3).body() == make(7, 3).body()
    assert make(7, 3).affinity != make(8, 3).affinity


def test_a_tool_loop_answers_each_call_by_its_id() -> None:
    talk = ToolTalk(1, 2)
    talk.hear(said(""))
    messages = talk.body()["messages"]
    assert messages[-2]["tool_calls"][0]["id"] == messages[-1]["tool_call_id"]
    assert set(json.loads(messages[-2]["tool_calls"][0]["function"]["arguments"])) == {"pattern", "folder"}
    assert talk.body()["tools"]


def test_a_picture_is_a_png() -> None:
    url = ImageTalk(1, 1).body()["messages"][0]["content"][0]["image_url"]["url"]
    assert base64.b64decode(url.split(",", 1)[1]).startswith(b"\x89PNG")


@dataclass
class Counted:
    num_requests: int
    num_failures: int = 0
    avg_response_time: float = 0.0

    def get_response_time_percentile(self, percent: float) -> float:
        return self.avg_response_time * 2


def test_thresholds_are_met_or_named() -> None:
    entries = {
        ("agent, later turn", "POST"): Counted(90, 2),
        ("agent, ms", "TTFT"): Counted(90, 0, 400.0),
        ("agent, %", "CACHED"): Counted(50, 0, 60.0),
        ("chat, %", "CACHED"): Counted(50, 0, 80.0),
    }
    assert Thresholds(0.1, 900.0, 0.65).missed(entries) == []
    assert len(Thresholds().missed(entries)) == 1
    assert Thresholds(0.1, 700.0).missed(entries) == ["TTFT p95 of agent, ms is 800 ms, 700 at most"]
    assert Thresholds(0.1, 0.0, 0.75).missed(entries) == ["70.0% of later turns was cached, 75.0% must be"]
