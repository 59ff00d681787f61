"""Composition root of the edge: builds every object once, wires the routes, starts and stops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from billing.config import BillingConfig
from gateway.config import GatewayConfig, ReplicaAddress, ServedModel


def run(
    config: GatewayConfig,
    models: Sequence[ServedModel],
    replicas: Sequence[ReplicaAddress],
    billing: BillingConfig,
    data_dir: Path,
) -> None:
    """Serve until SIGTERM or SIGINT, then stop gracefully: requests in flight end, every usage record is
    durable.

    ``data_dir`` holds ``secrets/`` (the pool token and the secret that cache salts derive from, made on first
    use), ``spool/`` and, with the default database, the store.

    Raises:
        OSError: the port is taken or the data directory cannot be written.
    """
