"""Holding a judge's counts against the bill: what differs is found, and prompts reach it at their scale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.exchange import Endpoint
from loadtest.judges import hub_cache
from loadtest.judges.aiperf import Aiperf
from loadtest.judges.counted import Counted, JudgeError, compare
from loadtest.judges.guidellm import Guidellm
from loadtest.judges.trace import scaled, write_turns, write_whole
from loadtest.replay.trace import read_trace, synthetic_trace

ENDPOINT = Endpoint("http://gateway", "acc", "token", "model")


def row(session: str, prompt: int = 50, cached: int = 32, completion: int = 8) -> dict[str, Any]:
    return {
        "session": session,
        "prompt_tokens": prompt,
        "cached_prompt_tokens": cached,
        "completion_tokens": completion,
    }


def test_counts_that_agree_have_no_problem() -> None:
    counted = [Counted("s", 50, 32, 8), Counted("s", 60, 48, 9), Counted("t", 7, 0, 1, request_id="c")]
    rows = {"a": row("s", 60, 48, 9), "b": row("s"), "c": row("t", 7, 0, 1)}
    verdict = compare(counted, rows)
    assert verdict.problems == []
    assert verdict.counted == {"prompt_tokens": 117, "cached_tokens": 80, "completion_tokens": 18}
    assert verdict.billed == verdict.counted


@pytest.mark.parametrize("changed", [row("s", 51), row("s", 50, 16), row("s", 50, 32, 9), row("other")])
def test_a_row_that_differs_in_anything_is_named(changed: dict[str, Any]) -> None:
    verdict = compare([Counted("s", 50, 32, 8)], {"a": changed})
    assert len(verdict.problems) == 2  # counted and not billed so, billed and not counted so


def test_sums_that_agree_by_chance_do_not_hide_a_difference() -> None:
    counted = [Counted("s", 50, 32, 8, "a"), Counted("s", 60, 32, 8, "b")]
    assert len(compare(counted, {"a": row("s", 60), "b": row("s", 50)}).problems) == 2


def test_requests_that_one_side_does_not_know_are_named() -> None:
    assert compare([Counted("s", 1, 0, 1, "gone")], {}).problems == ["gone: counted, and not billed"]
    assert compare([], {"a": row("s")}).problems == ["s: 1 billed as (50, 32, 8), and not counted so"]


def test_whole_prompts_keep_their_blocks_at_the_smaller_scale(tmp_path: Path) -> None:
    source = synthetic_trace(20, seed=3)
    write_whole(scaled(source, 512, 16, 2.0, 12), tmp_path / "t")
    found = read_trace(tmp_path / "t", 16, 100)  # checks that lengths and ids agree
    assert [entry.hash_ids for entry in found] == [entry.hash_ids for entry in source]
    assert found[-1].timestamp == pytest.approx(source[-1].timestamp / 2, abs=1)
    assert max(entry.output_length for entry in found) <= 12


def test_turns_say_only_what_is_new(tmp_path: Path) -> None:
    entries = scaled(synthetic_trace(20, seed=3), 512, 16, 1.0, 12)
    sessions = write_turns(entries, tmp_path / "t", 16, "run")
    lines = [json.loads(line) for line in (tmp_path / "t").read_text().splitlines()]
    assert {line["session_id"] for line in lines} == set(sessions)
    for session in sessions:
        own = [line for line in lines if line["session_id"] == session]
        whole = [entry for entry in entries if f"run-{entry.session_id}" == session]
        # Every turn but the last ends in a partial block, which the next turn does not repeat.
        said = [block for line in own for block in line["hash_ids"][:-1]] + own[-1]["hash_ids"][-1:]
        assert said == whole[-1].hash_ids
        assert all(-(-line["input_length"] // 16) == len(line["hash_ids"]) for line in own)


def test_a_tokenizer_is_laid_out_as_a_cache_and_never_fetched(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_text(name)
    variables = hub_cache.lay_out(tmp_path, tmp_path / "home")
    (found,) = (tmp_path / "home").glob("hub/models--local--tokenizer/snapshots/*/tokenizer.json")
    assert found.read_text() == "tokenizer.json"
    assert variables["HF_HUB_OFFLINE"] == "1"
    (tmp_path / "config.json").unlink()
    with pytest.raises(hub_cache.TokenizerError, match=r"no config\.json"):
        hub_cache.lay_out(tmp_path, tmp_path / "other")


def test_reports_are_read_request_by_request(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    metrics = {"usage_prompt_tokens": 5, "usage_prompt_cache_read_tokens": 4, "usage_completion_tokens": 3}
    line = {"metadata": {"x_correlation_id": "s"}, "metrics": {k: {"value": v} for k, v in metrics.items()}}
    (tmp_path / "report/profile_export.jsonl").write_text(json.dumps(line) + "\n")
    assert Aiperf(tmp_path, "run").counted() == [Counted("s", 5, 4, 3)]
    request = {"prompt_tokens": 5, "cached_tokens": 4, "output_tokens": 3, "response_id": "chatcmpl-x"}
    requests: dict[str, list[Any]] = {"successful": [request], "errored": [], "incomplete": []}
    (tmp_path / "report.json").write_text(json.dumps({"benchmarks": [{"requests": requests}]}))
    assert Guidellm(tmp_path, "run").counted() == [Counted("run", 5, 4, 3, "x")]


def test_a_failed_request_of_a_judge_is_no_count(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report/profile_export.jsonl").write_text(json.dumps({"error": {"code": 500}}) + "\n")
    with pytest.raises(JudgeError, match="500"):
        Aiperf(tmp_path, "run").counted()
    requests: dict[str, list[Any]] = {"successful": [], "errored": [{}], "incomplete": []}
    (tmp_path / "report.json").write_text(json.dumps({"benchmarks": [{"requests": requests}]}))
    with pytest.raises(JudgeError, match="1 requests of guidellm were errored"):
        Guidellm(tmp_path, "run").counted()


@pytest.mark.parametrize("judge", [Aiperf, Guidellm])
def test_a_judge_left_no_report(tmp_path: Path, judge: type[Aiperf] | type[Guidellm]) -> None:
    command = judge(tmp_path, "run").command(
        Path("/bin/x"), ENDPOINT, scaled(synthetic_trace(3, 1), 512, 16, 1.0, 4), 16
    )
    assert command[0] == "/bin/x"
    assert (tmp_path / "trace.jsonl").read_bytes().count(b"\n") == 3
    with pytest.raises(JudgeError, match="left no"):
        judge(tmp_path, "run").counted()
