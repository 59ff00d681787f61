"""Builds the tiers below an engine's KV cache, as configured. A tier that cannot be had costs no start."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from backend.config import BackendConfig, TierConfig
from backend.engine.block_store import BlockStore
from backend.engine.block_tags import BlockTags
from backend.engine.kv_blocks import KvBlocks
from backend.engine.scheduler import Scheduler
from backend.engine.tiering import Tiering
from backend.transfer.disk import DiskTier
from backend.transfer.host import HostTier
from backend.transfer.payload import KvLayout
from backend.transfer.tier_thread import TierThread
from backend.transfer.tiers import Tiers

_GIB = 2**30
_PROGRESS_INTERVAL_S = 5.0
_logger = logging.getLogger("backend.engine")


def open_tiering(
    config: BackendConfig,
    kv: KvBlocks | None,
    store: BlockStore | None,
    tags: BlockTags,
    scheduler: Scheduler,
    clock_s: Callable[[], float],
) -> Tiering | None:
    """The configured tiers, known to the scheduler; None when there are none or blocks cannot leave here.

    Raises:
        ValueError: naming the setting that cannot work.
    """
    tiers = config.cache.tiers
    if not tiers.host_gib and not tiers.disk_gib:
        return None
    if tiers.disk_gib and not tiers.path:
        raise ValueError("cache.tiers.path: must name a directory when cache.tiers.disk_gib is set")
    if kv is None or store is None:
        _logger.warning("no cache tiers: this replica has several ranks or no prefix cache")
        return None
    host = HostTier(int(tiers.host_gib * _GIB)) if tiers.host_gib else None
    disk = _open_disk(tiers, config.replica_id, store.layout) if tiers.disk_gib else None
    if host is None and disk is None:
        return None
    tiering = Tiering(Tiers(host, disk), store, tags, kv, tiers, clock_s)
    scheduler.holds_back = tiering.holds_back
    return tiering


def _open_disk(config: TierConfig, replica_id: str, layout: KvLayout) -> TierThread | None:
    directory = Path(config.path) / replica_id
    try:
        disk = DiskTier.open(directory, layout, int(config.disk_gib * _GIB), _ScanReport())
    except OSError as error:
        _logger.error("no disk tier: %s: %s", directory, error.strerror)
        return None
    _logger.info("the disk tier holds %d blocks, %.3f GiB", len(disk), disk.num_bytes / _GIB)
    return TierThread(disk, int(config.max_queue_mib * 2**20), config.retry_after_s)


class _ScanReport:
    """Logs how far the look at the slots is, now and then."""

    def __init__(self) -> None:
        self._told_at_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._told_at_s >= _PROGRESS_INTERVAL_S:
            self._told_at_s = time.monotonic()
            _logger.info("looked at %d of %d blocks of the disk tier", done, total)
