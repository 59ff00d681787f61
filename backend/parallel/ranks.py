"""One rank: joins the others and loads its part of the model."""

from __future__ import annotations

import msgspec
import torch
from torch._C._distributed_c10d import Store

from backend.config import BackendConfig, DeviceConfig
from backend.engine.runner import ModelRunner
from backend.model.errors import ModelLoadError
from backend.model.loader import Progress
from backend.model.placement import count_threads
from backend.parallel.group import RankGroup, RankPlace
from backend.parallel.rank_shard import RankShard


class RankLostError(Exception):
    """A rank is gone, or failed in the middle of a step: nothing can be computed any more."""


def join_and_load(
    config: BackendConfig,
    rank: int,
    store: Store,
    progress: Progress = lambda share, doing: None,
) -> tuple[ModelRunner, RankGroup, RankShard]:
    """Meet the other ranks at ``store`` and load this one's part; returns when all have.

    Raises:
        backend.model.errors.ModelLoadError: naming what is wrong with the model or the settings.
        RuntimeError: when another rank is lost.
    """
    device = device_of(config.device, rank, config.parallel.world)
    place = RankPlace(rank, config.parallel.tensor, config.parallel.expert)
    backend = "gloo"
    if device.device.startswith("cuda"):
        backend = "nccl"
        torch.cuda.set_device(torch.device(device.device))
    group = RankGroup(place, store, backend, config.parallel.exchange_timeout_s)
    shard = RankShard(group)
    own = msgspec.structs.replace(config, device=device)
    runner = ModelRunner.load(own, progress, shard)
    group.barrier()
    return runner, group, shard


def device_of(device: DeviceConfig, rank: int, world: int) -> DeviceConfig:
    """Each rank has its own GPU, or its share of the cores and dense weights.

    Raises:
        ModelLoadError: when the settings are for one rank.
    """
    if device.weights == "packed":
        raise ModelLoadError(
            "device.weights: 'packed' is for one rank; parts of a model are 'float32' on a CPU"
        )
    name = device.device
    if name.startswith("cuda:"):
        raise ModelLoadError(f"device.device: {name!r} is one GPU; ranks take one each with 'cuda' or 'auto'")
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return msgspec.structs.replace(device, device=f"cuda:{rank}")
    threads = max(count_threads(device) // world, 1)
    return msgspec.structs.replace(device, threads=threads, weights="float32")
