"""``embergate simulate`` from arguments to output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.embergate.conftest import CommandLine

SMALL = [
    "--sessions=40",
    "--rate=4",
    "--turns=3",
    "--shared-tokens=1024",
    "--first-tokens=512",
    "--turn-tokens=256",
    "--output-tokens=20",
    "--think=1",
]


def test_policies_are_compared_priced_and_put_on_a_page(command_line: CommandLine, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = command_line.run(
        "simulate",
        "run",
        *SMALL,
        "--replicas=2",
        "--policies=rendezvous,round-robin",
        f"--report={page}",
        f"--plot={tmp_path / 'plot.svg'}",
    )
    assert done.returncode == 0, done.stderr
    assert "rendezvous" in done.stdout
    assert "round-robin" in done.stdout
    assert "embergate simulate run" in page.read_text()
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")
    shown = command_line.run("simulate", "run", *SMALL, "--replicas=2", "--policies=rendezvous", "--json")
    (answer,) = json.loads(shown.stdout)
    assert answer["results"]["num_requests"] >= 40
    assert 0 < answer["results"]["hit_ratio"] < 1
    again = command_line.run("simulate", "run", *SMALL, "--replicas=2", "--policies=rendezvous", "--json")
    assert json.loads(again.stdout)[0]["results"] == answer["results"]


def test_the_number_of_replicas_for_a_target_is_found(command_line: CommandLine) -> None:
    done = command_line.run("simulate", "size", *SMALL, "--ttft=5", "--json")
    assert json.loads(done.stdout)["num_replicas"] >= 1
    done = command_line.run("simulate", "size", *SMALL, "--ttft=0.000001", "--max-replicas=2")
    assert done.returncode == 1
    assert "even 2 replicas" in done.stderr


def test_both_models_of_time_are_compared(command_line: CommandLine) -> None:
    done = command_line.run("simulate", "check", *SMALL, "--replicas=2", "--json")
    answer = json.loads(done.stdout)
    assert abs(answer["step"]["hit_ratio"] - answer["flow"]["hit_ratio"]) < 0.1


def test_hit_ratios_of_a_trace(command_line: CommandLine, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    entry = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}
    trace.write_text("".join(json.dumps(entry) + "\n" for _ in range(4)))
    done = command_line.run("simulate", "caches", "--trace", str(trace), "--capacity=10", "--json")
    answer = json.loads(done.stdout)
    assert answer["by_capacity"] == [{"capacity": 10, "blocks": 0.75, "tokens": 0.75}]
    assert {row["policy"] for row in answer["by_policy"]} == {
        "round-robin", "first-block", "prefix-aware", "rendezvous"
    }  # fmt: skip
    assert "0.750" in command_line.run("simulate", "caches", "--trace", str(trace)).stdout
    trace.write_text("{}\n")
    assert "trace.jsonl:1" in command_line.run("simulate", "caches", "--trace", str(trace)).stderr


def test_a_profile_is_fitted_and_used(command_line: CommandLine, tmp_path: Path) -> None:
    steps, profile = tmp_path / "steps.jsonl", tmp_path / "mine.yaml"
    rows = [
        {"num_decodes": n, "num_prefill_tokens": p, "num_context_tokens": n * 100, "step_s": 0.01 + 0.001 * p}
        for n in range(3)
        for p in (0, 50, 100)
    ]
    steps.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = command_line.run("simulate", "fit", str(steps), "--name=mine", f"--write={profile}")
    assert done.returncode == 0, done.stderr
    used = command_line.run(
        "simulate", "run", *SMALL, "--replicas=1", "--policies=rendezvous", f"--profile={profile}"
    )
    assert used.returncode == 0, used.stderr
    steps.write_text("")
    assert "too few" in command_line.run("simulate", "fit", str(steps), "--name=x", "--write=y.yaml").stderr
    assert "h200-kimi" in command_line.run("simulate", "profiles").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies=luck",), "there is no luck"),
        (("--profile=abacus",), "there is no 'abacus'"),
        (("--split=1",), "is not like 1+3"),
        (("--split=1+1", "--fidelity=flow"), "split"),
        (("--event=explode",), "is not like"),
        (("--event=fail:replica-9@1",), "there is no replica-9"),
        (("--replicas=0",), "replicas"),
        (("--rate=0",), "sessions_per_s"),
        (("--turns=0",), "mean_turns"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(
    command_line: CommandLine, arguments: tuple[str, ...], message: str
) -> None:
    done = command_line.run("simulate", "run", *SMALL, *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
