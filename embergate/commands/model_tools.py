"""``embergate models make-tiny`` and ``embergate models plan``"""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any

import click

from backend.model.errors import ModelLoadError
from backend.model.plan import MemoryPlan, parse_gpus, plan_memory
from embergate.commands.context import with_settings
from embergate.config import TinyForm
from embergate.config_file import Settings
from embergate.layout import DataLayout
from embergate.preflight import check_data_dir
from embergate.refusal import Refusal
from embergate.terminal import print_json, print_table, voice
from embergate.tiny_model import derive_ranks, read_tiktoken, write_tiny

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_MAX_SEED = 2**63 - 1
_MAX_GIB = 2.0**20


class _Gibibytes(click.FloatRange):
    """A finite amount: ``nan`` is neither below a bound nor above it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        amount = super().convert(value, param, ctx)
        if not isfinite(amount):
            self.fail(f"{value} is no amount of memory", param, ctx)
        return amount


@click.command(name="make-tiny")
@click.argument("directory", type=_DIRECTORY)
@click.option(
    "--format",
    "form",
    type=click.Choice(["bf16", "fp8", "int4"]),
    required=True,
    help="What the matrices are stored as.",
)
@click.option(
    "--seed", type=click.IntRange(0, _MAX_SEED), default=0, show_default=True, help="Of the weights."
)
@click.option(
    "--tiktoken",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A vocabulary to use [one made from the embedded model's].",
)
@with_settings
def make_tiny(settings: Settings, directory: Path, form: TinyForm, seed: int, tiktoken: Path | None) -> None:
    """Write a small random checkpoint in exactly Kimi K2.5's form, vision tower included.

    Names, shards, index, configuration and vocabulary files are the real model's; only sizes differ.
    """
    if directory.exists() and any(directory.iterdir()):
        raise Refusal(f"{directory} is not empty: name a new directory.")
    with voice() as speaker:
        if tiktoken is None:
            check_data_dir(settings.data_dir)
            ranks = derive_ranks(DataLayout(settings.data_dir), speaker)
        else:
            ranks = read_tiktoken(tiktoken)
        write_tiny(directory, form, seed, ranks, speaker)
        speaker.say(f"{form}: written to {directory}")


@click.command()
@click.argument("directory", type=_DIRECTORY)
@click.option("--gpus", required=True, help="As in 8xH200 or 4x48GB.")
@click.option(
    "--reserve-gib",
    type=_Gibibytes(0, _MAX_GIB),
    default=6.0,
    show_default=True,
    help="Memory of each GPU for activations, kernels and the driver.",
)
@click.option("--max-model-len", type=click.IntRange(min=1), help="Tokens of one sequence [the model's].")
@click.option("--text-only", is_flag=True, help="Leave out the vision tower.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    directory: Path,
    gpus: str,
    reserve_gib: float,
    max_model_len: int | None,
    text_only: bool,
    as_json: bool,
) -> None:
    """Say whether a checkpoint fits on GPUs under tensor parallelism, and how many tokens its cache holds.

    Reads config.json and the heads of the files; never a weight. It is arithmetic about a deployment: a
    replica of this version runs on one device.
    """
    try:
        found = plan_memory(
            directory,
            parse_gpus(gpus),
            reserve_bytes=int(reserve_gib * 2**30),
            max_model_len=max_model_len,
            text_only=text_only,
        )
    except ModelLoadError as error:
        raise Refusal(f"{error}.") from error
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--gpus") from error
    if as_json:
        print_json(_for_programs(found))
    else:
        print_table(("per rank", "GiB", ""), _rows(found), numeric=("GiB",))


def _for_programs(plan: MemoryPlan) -> dict[str, int | bool]:
    return {
        "num_ranks": plan.gpus.count,
        "memory_bytes": plan.gpus.memory_bytes,
        "stored_bytes": plan.stored_bytes,
        "cut_bytes": plan.cut_bytes,
        "copied_bytes": plan.copied_bytes,
        "vision_bytes": plan.vision_bytes,
        "reserve_bytes": plan.reserve_bytes,
        "kv_bytes": plan.kv_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "is_kv_copied": plan.is_kv_copied,
        "kv_tokens": plan.kv_tokens,
        "max_model_len": plan.max_model_len,
    }


def _rows(plan: MemoryPlan) -> list[tuple[str, str, str]]:
    ranks = plan.gpus.count
    whole = "the same on every rank" if plan.is_kv_copied else f"a rank's part of {ranks}"
    sequence = plan.max_model_len * plan.kv_bytes_per_token
    return [
        ("memory", _gib(plan.gpus.memory_bytes), f"{ranks} x {plan.gpus.name}"),
        ("weights, cut", _gib(plan.cut_bytes), f"1/{ranks} of what can be cut by head, neuron or row"),
        ("weights, copied", _gib(plan.copied_bytes), f"of it {_gib(plan.vision_bytes)} for vision"),
        ("reserve", _gib(plan.reserve_bytes), "activations, kernels, driver"),
        ("KV cache", _gib(plan.kv_bytes), f"{plan.kv_tokens:,} tokens, {whole}"),
        ("one token", "", f"{plan.kv_bytes_per_token:,} bytes"),
        ("one sequence", _gib(sequence), f"{plan.max_model_len:,} tokens"),
        ("checkpoint", _gib(plan.stored_bytes), "on disk, in all"),
    ]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"
