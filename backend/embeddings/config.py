"""Configuration of one replica of an embedding model."""

from __future__ import annotations

from typing import Literal

import msgspec


class EmbeddingReplicaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``model_path`` is a directory with ``config.json``, ``model.safetensors`` and ``tokenizer.json``.

    Inputs longer than ``max_model_len`` tokens are refused or cut, as the request says. ``max_batch_tokens``
    bounds what is computed at once, padding included. At most ``max_waiting_inputs`` wait, none longer than
    ``max_queue_wait_s``.
    """

    replica_id: str
    model_path: str
    served_as: str
    host: str = "127.0.0.1"
    port: int = 8851
    pool_token: str = ""
    max_model_len: int = 512
    max_body_bytes: int = 64 * 1024 * 1024
    max_batch_tokens: int = 4096
    max_waiting_inputs: int = 8192
    max_queue_wait_s: float = 30.0
    threads: int = 1
    shutdown_grace_s: float = 10.0
    max_recent_usages: int = 20_000
    recent_usage_ttl_s: float = 3600.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
