"""``embergate simulate caches``, ``routing``, ``profiles`` and ``fit``: what needs no workload in time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from embergate.commands.simulation_options import profile_directory, profile_of
from embergate.refusal import Refusal
from embergate.terminal import console, print_json, print_table, say
from simulator.hit_tables import by_capacity, by_policy
from simulator.routing_cost import movement, routing_cost
from simulator.step_time import ProfileError, fit, read_profile, read_steps
from simulator.trace import TraceError

_CAPACITIES = (1_000_000, 100_000, 50_000, 30_000, 10_000, 3000, 1000)
_POOL_SIZES = (2, 8, 16, 64, 256, 1024, 4096)


@click.command()
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--capacity", "capacities", multiple=True, type=click.IntRange(min=1),
              help="Blocks of one pool; repeatable.")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--worker-blocks", type=click.IntRange(min=1), default=5859, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def caches(trace: Path, capacities: Sequence[int], workers: int, worker_blocks: int, as_json: bool) -> None:
    """Hit ratios of a trace by capacity, and by policy over several pools, without a model of time."""
    try:
        capacity_rows = by_capacity(
            trace, capacities or (1_000_000, 100_000, 50_000, 30_000, 10_000, 3000, 1000)
        )
        policy_rows = by_policy(trace, workers, worker_blocks)
    except TraceError as error:
        raise Refusal(str(error)) from error
    if as_json:
        print_json({"by_capacity": capacity_rows, "by_policy": policy_rows})
        return
    columns = ("block hit", "token hit")
    print_table(
        ("capacity, blocks", *columns),
        [(f"{row.capacity:,}", f"{row.blocks:.3f}", f"{row.tokens:.3f}") for row in capacity_rows],
        numeric=("capacity, blocks", *columns),
    )
    console().print(f"\n{workers} workers of {worker_blocks:,} blocks")
    print_table(
        ("policy", *columns, "imbalance"),
        [(r.policy, f"{r.blocks:.3f}", f"{r.tokens:.3f}", f"{r.imbalance:.2f}") for r in policy_rows],
        numeric=(*columns, "imbalance"),
    )


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def routing(as_json: bool) -> None:
    """Measure what routing costs by the number of replicas, and who moves when one comes and goes."""
    costs = [routing_cost(count) for count in _POOL_SIZES]
    moves = movement(63, 20_000)
    if as_json:
        print_json({"cost": costs, "movement": moves})
        return
    columns = ("rendezvous, us", "ring, us")
    print_table(
        ("replicas", *columns),
        [(f"{row.num_replicas:,}", f"{row.rendezvous_us:.1f}", f"{row.ring_us:.1f}") for row in costs],
        numeric=("replicas", *columns),
    )
    console().print(
        f"\n63 -> 64 -> 63 replicas: {moves.moved_by_growth:.4f} of {moves.num_sessions:,} sessions move to "
        f"the newcomer (1/64 = {1 / 64:.4f}), {moves.moved_to_others_than_the_newcomer} elsewhere; "
        f"{moves.still_moved_after_shrinking} are not back afterwards."
    )


@click.command()
def profiles() -> None:
    """List what replicas can be."""
    rows = []
    for path in sorted(profile_directory().glob("*.yaml")):
        profile = read_profile(path)
        rows.append((profile.name, f"{profile.kv_tokens:,}", str(profile.num_gpus), profile.step_time.source))
    print_table(("profile", "KV tokens", "GPUs", "source of its times"), rows, numeric=("KV tokens", "GPUs"))


@click.command(name="fit")
@click.argument("steps_file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--base", default="cpu-smollm2", show_default=True, help="Profile whose sizes are kept.")
@click.option("--name", required=True, help="Name of the new profile.")
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), required=True, metavar="FILE")
def fit_profile(steps_file: Path, base: str, name: str, write: Path) -> None:
    """Fit the time of a step to measured ones (JSON lines of num_decodes, num_prefill_tokens,
    num_context_tokens, step_s).
    """
    try:
        step_time = fit(read_steps(steps_file), f"fitted to {steps_file.name}")
    except ProfileError as error:
        raise Refusal(str(error)) from error
    profile = msgspec.structs.replace(profile_of(base), name=name, step_time=step_time)
    write.write_bytes(msgspec.yaml.encode(profile))
    say(f"Wrote {write}: median error {step_time.relative_error:.1%}.")
