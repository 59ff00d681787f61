"""Which processes one installation consists of."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from embergate.child import ChildSpec
from embergate.config_file import CONFIG_VARIABLE, DATA_DIR_VARIABLE, MODEL_VARIABLE, Settings
from embergate.layout import DataLayout


def plan_children(settings: Settings) -> list[list[ChildSpec]]:
    """The gateway, then the local replicas of both kinds: the order in which they are stopped.

    The gateway goes first, because requests in flight end while it still has replicas to end them with.
    """
    config, layout = settings.config, DataLayout(settings.data_dir)
    margin_s = config.supervisor.stop_timeout_s
    environment = {
        CONFIG_VARIABLE: str(settings.path),
        DATA_DIR_VARIABLE: str(settings.data_dir),
        MODEL_VARIABLE: config.local_model.id,
        "PYTHONUNBUFFERED": "1",
    }
    gateway = ChildSpec(
        name="gateway",
        command=_serve("gateway"),
        environment=environment,
        url=config.gateway_url,
        health_url=f"{config.gateway_url}/ready",
        log=layout.logs_dir / "gateway.log",
        stop_grace_s=config.gateway.shutdown_grace_s + margin_s,
    )
    replicas = [
        ChildSpec(
            name=address.id,
            command=_serve("replica", "--index", str(index)),
            environment=environment,
            url=address.url,
            health_url=f"{address.url}/health",
            log=layout.logs_dir / f"{address.id}.log",
            stop_grace_s=config.replicas.shutdown_grace_s + margin_s,
        )
        for index, address in enumerate(config.local_addresses())
    ]
    embeddings = [
        ChildSpec(
            name=address.id,
            command=_serve("embeddings", "--index", str(index)),
            environment=environment,
            url=address.url,
            health_url=f"{address.url}/health",
            log=layout.logs_dir / f"{address.id}.log",
            stop_grace_s=config.embeddings.shutdown_grace_s + margin_s,
        )
        for index, address in enumerate(config.embedding_addresses())
    ]
    return [[gateway], replicas + embeddings]


def _serve(*arguments: str) -> Sequence[str]:
    return (sys.executable, "-m", "embergate", "serve", *arguments)
