"""Which processes one installation consists of."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from embergate.child import ChildSpec
from embergate.config_file import CONFIG_VARIABLE, DATA_DIR_VARIABLE, MODEL_VARIABLE, Settings
from embergate.layout import DataLayout
from gateway.config import ReplicaAddress


def plan_children(settings: Settings) -> list[list[ChildSpec]]:
    """The gateway, then the local replicas of both kinds: the order in which they are stopped.

    The gateway goes first, because requests in flight end while it still has replicas to end them with.
    """
    config, layout = settings.config, DataLayout(settings.data_dir)
    environment = {
        CONFIG_VARIABLE: str(settings.path),
        DATA_DIR_VARIABLE: str(settings.data_dir),
        MODEL_VARIABLE: config.local_model.id,
        "PYTHONUNBUFFERED": "1",
    }

    def child(
        name: str, command: Sequence[str], url: str, grace_s: float, health: str = "/health"
    ) -> ChildSpec:
        return ChildSpec(
            name=name,
            command=command,
            environment=environment,
            url=url,
            health_url=url + health,
            log=layout.logs_dir / f"{name}.log",
            stop_grace_s=grace_s + config.supervisor.stop_timeout_s,
        )

    def numbered(kind: str, addresses: Iterable[ReplicaAddress], grace_s: float) -> list[ChildSpec]:
        return [
            child(address.id, _serve(kind, "--index", str(index)), address.url, grace_s)
            for index, address in enumerate(addresses)
        ]

    gateway = child(
        "gateway", _serve("gateway"), config.gateway_url, config.gateway.shutdown_grace_s, "/ready"
    )
    replicas = numbered("replica", config.local_addresses(), config.replicas.shutdown_grace_s)
    embeddings = numbered("embeddings", config.embedding_addresses(), config.embeddings.shutdown_grace_s)
    return [[gateway], replicas + embeddings]


def _serve(*arguments: str) -> Sequence[str]:
    return (sys.executable, "-m", "embergate", "serve", *arguments)
