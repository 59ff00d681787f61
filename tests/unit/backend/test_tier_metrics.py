from __future__ import annotations

from typing import Any

from backend.engine.messages import EngineStats, TierStats
from backend.metrics import ReplicaMetrics


def test_tiers_are_shown_where_there_are_some() -> None:
    names = TierStats.__struct_fields__
    numbers: dict[str, Any] = {name: at for at, name in enumerate(names, start=1)}
    tiers = TierStats(**numbers | {"is_disk_writable": False})
    shown = ReplicaMetrics("m", lambda: EngineStats(tiers=tiers)).expose().decode()
    assert 'vllm:external_prefix_cache_hits_total{model_name="m"} 2.0' in shown
    assert f'embergate_kv_tier_corrupt_blocks_total{{model_name="m"}} {numbers["num_corrupt"]}.0' in shown
    assert 'embergate_kv_tier_disk_writable{model_name="m"} 0.0' in shown
    assert "kv_tier" not in ReplicaMetrics("m", EngineStats).expose().decode()
