"""``python -m gateway FILE``: the edge as one process, from one JSON file of the sections that it reads.

``embergate serve gateway`` is the usual way; it reads ``config.yaml``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from billing.config import BillingConfig
from gateway.app import run
from gateway.config import GatewayConfig, ReplicaAddress, ServedModel


class GatewayProcess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one gateway process is made from."""

    data_dir: str
    models: list[ServedModel]
    replicas: list[ReplicaAddress]
    billing: BillingConfig
    gateway: GatewayConfig = GatewayConfig()


def main(arguments: list[str]) -> int:
    """Run until signalled; returns the exit status."""
    if len(arguments) != 1:
        print("usage: python -m gateway FILE.json", file=sys.stderr)  # noqa: T201
        return 2
    process = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=GatewayProcess)
    run(process.gateway, process.models, process.replicas, process.billing, Path(process.data_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
