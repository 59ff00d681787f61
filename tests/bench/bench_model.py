"""Where the time of a Kimi layer goes: ``make bench-model``, or ``python -m tests.bench.bench_model``.

One MoE layer of the tiny configuration and one of the real size (hidden 7168, 64 heads, a router of 384
experts), with random weights; of the real layer only some experts are loaded, and chosen ones that are not
there are stood in for. Both forms of latent attention are timed for every batch; the engine's own choice is
marked. Times are the best of several calls.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from backend.config import DeviceConfig
from backend.model.config import ModelConfig, parse_config
from backend.model.placement import choose_placement
from backend.model.rope import build_rope_table
from backend.model.tiny_checkpoint import TinyShape, tiny_config
from tests.bench.model_layer import Form, Layer

KIMI = TinyShape(
    hidden=7168, num_heads=64, q_lora_rank=1536, kv_lora_rank=512, head_dim=128, intermediate=18432,
    num_experts=384, experts_per_token=8, expert_dim=2048, has_vision=False,
)  # fmt: skip
LOADED = 16
CONTEXT = 2048
BATCHES = {"decode x1": (1, 1), "decode x8": (8, 1), "prefill 256": (1, 256)}
"""By name: sequences, and new tokens of each, at the end of ``CONTEXT`` tokens."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One part of a layer on one batch."""

    layer: str
    form: str
    batch: str
    part: str
    milliseconds: float
    gflops: float
    is_used: bool


def configs() -> dict[str, tuple[ModelConfig, int]]:
    """By name: the configuration, and how many experts are loaded."""
    tiny = parse_config(tiny_config("bf16", TinyShape(has_vision=False), 512), "tiny")
    fields = tiny_config("bf16", KIMI, 512)
    fields["text_config"]["qk_rope_head_dim"] = 64
    return {"tiny": (tiny, 16), "Kimi K2.5": (parse_config(fields, "kimi"), LOADED)}


def best_ms(run: Callable[[], object], budget_s: float) -> float:
    """The shortest of at least two calls, and of as many as the budget allows."""
    best, until, calls = float("inf"), time.perf_counter() + budget_s, 0
    while calls < 2 or time.perf_counter() < until:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
        calls += 1
    return best * 1e3


def measure(name: str, form: Form, threads: int, budget_s: float) -> list[Figure]:
    config, num_loaded = configs()[name]
    weights = "packed" if form == "int4" else "float32"
    device = DeviceConfig(device="cpu", dtype="float32", threads=threads, weights=weights)  # type: ignore[arg-type]
    placement = choose_placement(device, config)
    print(
        f"{name}, {form}: making {num_loaded} of {config.moe and config.moe.num_experts} experts", flush=True
    )
    layer = Layer(config, num_loaded, form, placement)
    table = build_rope_table(config.rope, CONTEXT, placement.device)
    figures: list[Figure] = []
    for batch, (num_sequences, num_queries) in BATCHES.items():
        other = {"absorbed": "MLA naive (expanded)", "naive (expanded)": "MLA absorbed"}
        unused = other[layer.chosen_form(num_queries)]
        for part in layer.parts(num_sequences, num_queries, CONTEXT, table):
            milliseconds = best_ms(part.run, budget_s)
            is_used = part.name != unused and not part.name.startswith(" ")
            gflops = part.num_flops / milliseconds / 1e6
            figures.append(Figure(name, form, batch, part.name, milliseconds, gflops, is_used))
            print(f"  {batch:12} {part.name:30} {milliseconds:10.3f} ms", flush=True)
    return figures


def table_of(figures: list[Figure]) -> str:
    """One Markdown table per layer and form."""
    lines = []
    for layer, form in dict.fromkeys((figure.layer, figure.form) for figure in figures):
        own = [figure for figure in figures if (figure.layer, figure.form) == (layer, form)]
        lines += ["", f"## {layer}, {form}", "", "| part | " + " | ".join(BATCHES) + " |"]
        lines.append("|---" * (len(BATCHES) + 1) + "|")
        totals = {
            batch: sum(figure.milliseconds for figure in own if figure.batch == batch and figure.is_used)
            for batch in BATCHES
        }
        for part in dict.fromkeys(figure.part for figure in own):
            row = {figure.batch: figure for figure in own if figure.part == part}
            lines.append(
                f"| {part} | " + " | ".join(cell(row[batch], totals[batch]) for batch in BATCHES) + " |"
            )
        lines.append(
            "| **layer** | " + " | ".join(f"**{totals[batch]:,.2f} ms**" for batch in BATCHES) + " |"
        )
    return "\n".join(lines)


def cell(figure: Figure, total: float) -> str:
    rate = f", {figure.gflops:,.0f} GFLOP/s" if figure.gflops >= 1 else ""
    share = f" ({figure.milliseconds / total:.0%}{rate})" if figure.is_used else f" (not used{rate})"
    if figure.part.startswith(" "):
        share = ""
    return f"{figure.milliseconds:,.3f} ms{share}"


def report_of(figures: list[Figure], threads: int) -> str:
    return (
        "# Where the time of a Kimi layer goes\n\n"
        f"`make bench-model`, {threads} thread{'s' * (threads != 1)}, {CONTEXT:,} tokens of context, random "
        f"weights; of the real layer\n{LOADED} of 384 experts are loaded. Shares are of the layer with the "
        "form of latent attention that the engine takes; the\nother form stands beside it. Experts are INT4 "
        "or float32 as named, everything else is float32.\n" + table_of(figures) + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budget", type=float, default=0.5, help="seconds for one figure")
    parser.add_argument("--layers", default="tiny,Kimi K2.5")
    parser.add_argument("--forms", default="int4,float32")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--write", type=Path, help="write the report, such as docs/reports/model-parts.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    figures: list[Figure] = []
    with torch.inference_mode():
        for name in options.layers.split(","):
            for form in options.forms.split(","):
                figures += measure(name, form, options.threads, options.budget)
    report = report_of(figures, options.threads)
    print("\n" + report)
    if options.json:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n")
    if options.write:
        options.write.write_text(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
