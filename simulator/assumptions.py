"""What a scenario rests on, as rows for people."""

from __future__ import annotations

from simulator.scenario import Scenario, SessionSource, TraceSource
from simulator.step_time import StepTime

Row = tuple[str, str]


def assumptions(scenario: Scenario) -> list[Row]:
    """(what, value) rows: workload, replicas, time model, limits."""
    profile, time = scenario.profile, scenario.profile.step_time
    error = "not fitted here" if time.relative_error is None else f"median error {time.relative_error:.1%}"
    rows = [
        *_workload(scenario.source),
        ("replicas", f"{scenario.num_replicas} of profile {profile.name}, {profile.num_gpus} GPUs each"),
        ("KV cache of a replica", f"{profile.kv_tokens:,} tokens"),
        (
            "batch of a replica",
            f"{profile.max_running} sequences, {profile.max_tokens_per_step:,} tokens a step",
        ),
        (
            "time of a step",
            f"{1e3 * time.base_s:.3g} ms + {1e3 * time.decode_s:.3g} ms a decode + "
            f"{1e6 * time.prefill_s:.3g} us a prompt token + {1e6 * time.context_s:.3g} us a token attended "
            f"to{_of_prefill(time)} ({error}; {time.source})",
        ),
        ("model of time", "step by step" if scenario.fidelity == "step" else "closed form (flow)"),
        ("in flight per replica, at most", f"{scenario.limits.max_in_flight:,}"),
        ("targets", f"TTFT {scenario.targets.ttft_s:g} s, TPOT {1000 * scenario.targets.tpot_s:g} ms"),
        ("seed", str(scenario.seed)),
    ]
    if scenario.split is not None:
        split = scenario.split
        rows.append(
            (
                "prefill apart",
                f"each replica is a group of {split.num_prefill} prefill and {split.num_decode} decode "
                f"replicas, KV at {split.link_bytes_per_s / 1e9:g} GB/s, {profile.kv_bytes_per_token:,} "
                "bytes a token",
            )
        )
    return rows


def _of_prefill(time: StepTime) -> str:
    """What steps that prefill take besides, where the profile says so."""
    if not (time.prefill_step_s or time.attention_s):
        return ""
    return (
        f"; with prompts {1e3 * time.prefill_step_s:.3g} ms more and {1e9 * time.attention_s:.3g} ns a token "
        "that theirs attend to"
    )


def _workload(source: TraceSource | SessionSource) -> list[Row]:
    if isinstance(source, TraceSource):
        scale = source.scale
        return [
            (
                "workload",
                f"trace {source.path.name}, {scale.speed:g} times as fast, lengths times {scale.length:g}"
                + (f", the first {scale.max_requests:,} requests" if scale.max_requests else ""),
            ),
            ("affinity key", "the second block of a prompt (a trace has no sessions)"),
        ]
    shape = source.shape
    return [
        (
            "workload",
            f"{shape.num_sessions:,} sessions of {shape.num_accounts:,} accounts, {shape.sessions_per_s:g} "
            "new ones a second (Poisson), closed loop",
        ),
        (
            "a session",
            f"{shape.mean_turns:g} turns (geometric); {shape.shared_tokens:,} tokens that its account's "
            f"sessions share, {shape.mean_first_tokens:,} of its own, {shape.mean_turn_tokens:,} more each "
            f"turn, answers of {shape.mean_output_tokens:,}, {shape.mean_think_s:g} s of thought "
            "(exponential around these means)",
        ),
        ("block", f"{shape.block_tokens} tokens"),
    ]
