"""Loading streams: at no time is much more than one shard in memory above the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from backend.model.tiny_checkpoint import Form, TinyShape, write_tiny_checkpoint
from tests.support.kimi_text import tiny_ranks

SHAPE = TinyShape(num_layers=9, hidden=256, num_experts=128, expert_dim=128, has_vision=False)

# Private memory is sampled meanwhile; pages of the files themselves can be dropped at any time.
PROGRAM = """
import json, sys, threading, time
from backend.config import BackendConfig, DeviceConfig, ModelSource
from backend.engine.runner import ModelRunner

def private_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def sample():
    while not done.is_set():
        samples.append(private_bytes())
        time.sleep(0.001)

config = BackendConfig(replica_id="r0", model=ModelSource(path=sys.argv[1], served_as="tiny"),
                       device=DeviceConfig(device="cpu", threads=1, weights=sys.argv[2]))
samples, done = [private_bytes()], threading.Event()
sampler = threading.Thread(target=sample)
sampler.start()
runner = ModelRunner.load(config)
done.set()
sampler.join()
print(json.dumps({"before": samples[0], "peak": max(samples), "after": private_bytes()}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("form", "weights"), [("int4", "packed"), ("bf16", "packed"), ("int4", "float32")])
def test_the_peak_is_about_one_shard_above_the_weights(tmp_path: Path, form: Form, weights: str) -> None:
    write_tiny_checkpoint(tmp_path / form, form, tiny_ranks(), shape=SHAPE)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / form), weights],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    memory = json.loads(done.stdout)
    held = memory["after"] - memory["before"]
    above = memory["peak"] - memory["after"]
    # The weights are eight layers of equal size and little else.
    assert above < held / 8 * 1.25 + 4 * 2**20
