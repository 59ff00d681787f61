"""``make bench-tiers``: hit ratios of a real trace with tiers against what is known to be possible, and how
much sooner a restarted replica answers a known session."""

from __future__ import annotations

import itertools
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from backend.config import BackendConfig, CacheConfig, DeviceConfig, ModelSource, TierConfig
from backend.engine.engine import Engine
from backend.engine.runner import ModelRunner
from backend.transfer.disk import DiskTier
from backend.transfer.host import HostTier
from backend.transfer.tier_thread import TierThread
from backend.transfer.tiers import Tiers
from embergate.layout import DataLayout
from simulator.tier_replay import CONTENT_BYTES, LAYOUT, TieredPool, replay_tiers
from simulator.trace import read_trace
from tests.support.engine_driver import generate

TRACE = Path("../shared/data/mooncake/conversation_trace.jsonl")
TOLERANCE = 0.01
PROMPT_TOKENS = 400
CASES = ((2_000, 8_000, 0, 0.212), (5_000, 25_000, 0, 0.326), (2_000, 8_000, 50_000, 0.355))
"""Blocks of pool, host and disk, and the block hit of one LRU pool of pool + host, or of the larger disk."""
_SLOT_BYTES = 8 + LAYOUT.record_bytes


def hit_ratio(num_pool: int, num_host: int, num_disk: int) -> float:
    """Of the whole trace."""
    with tempfile.TemporaryDirectory() as directory:
        disk = None
        if num_disk:
            disk = TierThread(DiskTier.open(Path(directory), LAYOUT, num_disk * _SLOT_BYTES), 1 << 26)
        tiers = Tiers(HostTier(num_host * CONTENT_BYTES), disk)
        ratios = replay_tiers(read_trace(TRACE), TieredPool(num_pool, tiers))
        tiers.close(10.0)
    return ratios.blocks


def show_hit_ratios() -> bool:
    """Print the table; whether all are near enough."""
    if not TRACE.exists():
        print(f"hit ratios: skipped, {TRACE} is not here")
        return True
    print("  pool    host    disk   block hit  possible")
    is_near = True
    for num_pool, num_host, num_disk, possible in CASES:
        found = hit_ratio(num_pool, num_host, num_disk)
        is_near &= abs(found - possible) <= TOLERANCE
        print(f"{num_pool:6}  {num_host:6}  {num_disk:6}   {found:9.4f}  {possible:8.3f}")
    return is_near


def start(directory: str) -> Engine:
    layout = DataLayout(Path(os.environ.get("EMBERGATE_DATA_DIR", ".embergate")).resolve())
    config = BackendConfig(
        replica_id="r0",
        model=ModelSource(
            path=str(layout.embedded_checkpoint("kimi")), served_as="embedded", max_model_len=4096
        ),
        cache=CacheConfig(num_blocks=512, tiers=TierConfig(disk_gib=1.0, path=directory)),
        device=DeviceConfig(device="cpu", threads=1),
    )
    runner = ModelRunner.load(config)
    return Engine(runner, config, clock_s=time.monotonic, draw_seed=itertools.count().__next__)


def show_restart() -> bool:
    """Print the seconds to the first token of one prompt, cold and after a restart; whether both agree."""
    draw = random.Random(1)
    prompt = [draw.randrange(1000) for _ in range(PROMPT_TOKENS)]
    answers = []
    with tempfile.TemporaryDirectory() as directory:
        for name in ("cold", "restarted"):
            engine = start(directory)
            started_at_s = time.monotonic()
            answers.append(generate(engine, [prompt], max_tokens=1))
            took_s = time.monotonic() - started_at_s
            cached = engine.stats().cached_prompt_tokens
            print(f"{PROMPT_TOKENS} tokens, {name}: {took_s:.3f} s, {cached} of them cached")
            assert engine.tiering is not None
            engine.tiering.close()
    return answers[0] == answers[1]


if __name__ == "__main__":
    sys.exit(0 if show_hit_ratios() & show_restart() else 1)
