"""Options of the simulator's commands, and the scenario that they make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import simulator
from embergate.refusal import Refusal
from simulator.disaggregated import Split
from simulator.fleet import FleetLimits
from simulator.measures import Targets
from simulator.policies import make_policies
from simulator.scenario import Fidelity, Scenario, SessionSource, TraceSource, parse_event
from simulator.sessions import SessionShape
from simulator.step_time import ProfileError, ReplicaProfile, read_profile
from simulator.trace import TraceScale

_FLOW_FROM_REPLICAS = 64
"""So many replicas are simulated in closed form unless asked otherwise."""


def workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every command that runs a workload, in the order of ``--help``."""
    shape = SessionShape(num_sessions=2000, sessions_per_s=2.0)
    options = (
        click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
                     help="A trace in Mooncake's format; without one, simulated sessions."),
        click.option("--speed", type=float, default=1.0, show_default=True,
                     help="Play the trace so much faster."),
        click.option("--max-requests", type=click.IntRange(min=1), help="End the trace after so many."),
        click.option("--length", type=float, default=1.0, show_default=True,
                     help="Make the trace's prompts and answers so much longer."),
        click.option("--sessions", "num_sessions", type=int, default=shape.num_sessions, show_default=True),
        click.option("--rate", "sessions_per_s", type=float, default=shape.sessions_per_s, show_default=True,
                     help="New sessions a second."),
        click.option("--turns", "mean_turns", type=float, default=shape.mean_turns, show_default=True),
        click.option("--shared-tokens", type=int, default=shape.shared_tokens, show_default=True,
                     help="Tokens that all sessions of an account begin with."),
        click.option("--first-tokens", "mean_first_tokens", type=int, default=shape.mean_first_tokens,
                     show_default=True),
        click.option("--turn-tokens", "mean_turn_tokens", type=int, default=shape.mean_turn_tokens,
                     show_default=True),
        click.option("--output-tokens", "mean_output_tokens", type=int, default=shape.mean_output_tokens,
                     show_default=True),
        click.option("--think", "mean_think_s", type=float, default=shape.mean_think_s, show_default=True,
                     help="Seconds between an answer and the next turn."),
        click.option("--block-tokens", type=int, default=shape.block_tokens, show_default=True),
        click.option("--accounts", "num_accounts", type=int, default=shape.num_accounts, show_default=True),
        click.option("--profile", "profile_name", default="h200-kimi", show_default=True,
                     help="What a replica is: one of `simulate profiles`, or a YAML file."),
        click.option("--fidelity", type=click.Choice(["auto", "step", "flow"]), default="auto",
                     show_default=True,
                     help=f"Step by step, or closed form (auto: from {_FLOW_FROM_REPLICAS} replicas on)."),
        click.option("--max-in-flight", type=click.IntRange(min=1), default=256, show_default=True),
        click.option("--ttft", "ttft_s", type=float, default=2.0, show_default=True,
                     help="Target: seconds to the first token."),
        click.option("--tpot", "tpot_s", type=float, default=0.05, show_default=True,
                     help="Target: seconds for each further one."),
        click.option("--seed", type=int, default=1, show_default=True),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def scenario_of(given: dict[str, Any]) -> Scenario:
    """What the options ask for. Raises Refusal."""
    fidelity: Fidelity = given["fidelity"]
    if given["fidelity"] == "auto":
        fidelity = "flow" if given["num_replicas"] >= _FLOW_FROM_REPLICAS else "step"
    try:
        return Scenario(
            source=_source(given),
            profile=profile_of(given["profile_name"]),
            num_replicas=given["num_replicas"],
            fidelity=fidelity,
            split=_split(given.get("split_text")),
            limits=FleetLimits(max_in_flight=given["max_in_flight"]),
            targets=Targets(given["ttft_s"], given["tpot_s"]),
            window_s=given.get("window_s", 60.0),
            seed=given["seed"],
            pool_events=tuple(parse_event(text) for text in given.get("events", ())),
        )
    except ValueError as error:
        raise Refusal(str(error)) from error


def _source(given: dict[str, Any]) -> TraceSource | SessionSource:
    if given["trace"] is not None:
        if given["speed"] <= 0 or given["length"] <= 0:
            raise Refusal("--speed and --length must be positive")
        return TraceSource(given["trace"], TraceScale(given["speed"], given["max_requests"], given["length"]))
    names = SessionShape.__dataclass_fields__.keys() & given.keys()
    return SessionSource(SessionShape(**{name: given[name] for name in names}))


def _split(text: str | None) -> Split | None:
    if text is None:
        return None
    prefill, plus, decode = text.partition("+")
    if not plus or not prefill.isdecimal() or not decode.isdecimal():
        raise Refusal(f"--split: {text!r} is not like 1+3")
    return Split(int(prefill), int(decode))


def profile_directory() -> Path:
    """Where the profiles are that come with the simulator."""
    return Path(simulator.__file__).parent / "profiles"


def profile_of(name: str) -> ReplicaProfile:
    """A profile by its name or its file. Raises Refusal."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = profile_directory() / f"{name}.yaml"
        if not path.is_file():
            raise Refusal(f"--profile: there is no {name!r}; `embergate simulate profiles` lists them")
    try:
        return read_profile(path)
    except ProfileError as error:
        raise Refusal(str(error)) from error


def policies_of(text: str) -> list[str]:
    """Names of policies out of a list with commas. Raises Refusal."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in make_policies()]
    if unknown or not names:
        raise Refusal(
            f"--policies: there is no {', '.join(unknown) or 'policy'}; known: {', '.join(make_policies())}"
        )
    return names
