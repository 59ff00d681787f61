"""What ``config.yaml`` says, and what each process needs of it.

The sections of each room are declared by the room itself (``gateway.config``, ``backend.config``,
``billing.config``); this module puts them together. ``embergate.config_file`` reads the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec

from backend.config import (
    BackendConfig,
    CacheConfig,
    DeviceConfig,
    GrammarConfig,
    ModelSource,
    ParallelConfig,
    RegistrationConfig,
    Role,
    SchedulerConfig,
    SpeculationConfig,
    TelemetryConfig,
    TextConfig,
    TransferConfig,
)
from backend.embeddings.config import EmbeddingReplicaConfig
from billing.config import BillingConfig
from gateway.config import EMBEDDINGS_TASK, TEXT_TASK, GatewayConfig, ReplicaAddress, ServedModel, Task

OWN_FIELDS = frozenset({"replica_id", "model", "port", "pool_token", "role"})
"""What differs from one local replica to the next; everything else of a replica stands in ``replicas``."""


TinyForm = Literal["bf16", "fp8", "int4"]

TINY_SOURCES: Mapping[str, TinyForm] = MappingProxyType(
    {"tiny-bf16": "bf16", "tiny-fp8": "fp8", "tiny-int4": "int4"}
)
"""Sources that mean the tiny model, which Embergate prepares by itself too."""


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the file and the key at fault."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configuration section: immutable, and a typo in a key is an error."""


class ModelConfig(_Section, frozen=True, kw_only=True):
    """One catalog entry.

    ``source`` is ``embedded``, ``tiny-bf16``, ``tiny-fp8`` or ``tiny-int4`` (prepared at the first start), or
    the path of a checkpoint directory or GGUF file. ``form`` is the embedded model's.
    """

    id: str
    source: str = "embedded"
    form: Literal["kimi", "llama"] = "kimi"
    aliases: list[str] = []
    text_only: bool = False
    max_model_len: int = 8192
    default_max_tokens: int = 256
    default_temperature: float = 1.0
    default_top_p: float = 1.0
    description: str = ""
    task: Task = TEXT_TASK
    created_at: str = ""
    tags: list[str] = []
    properties: dict[str, str] = {}

    @property
    def is_embedded(self) -> bool:
        """Whether the model is the one that Embergate prepares by itself."""
        return self.source == "embedded"

    @property
    def tiny_form(self) -> TinyForm | None:
        """What the tiny model's matrices are stored as, when this is the tiny model."""
        return TINY_SOURCES.get(self.source)


class ReplicasConfig(_Section, frozen=True, kw_only=True):
    """The local replicas, all alike, on consecutive ports, and the addresses of replicas run elsewhere.

    ``model`` is the catalog id that the local ones serve; empty means the first of ``models``. ``roles`` are
    theirs in order; further ones are ``both``. What else is
    here means what it means in :class:`backend.config.BackendConfig`.
    """

    count: int = 2
    host: str = "127.0.0.1"
    base_port: int = 8801
    model: str = ""
    max_body_bytes: int = 64 * 1024 * 1024
    max_choices: int = 128
    max_write_stall_s: float = 60.0
    max_recent_usages: int = 20_000
    recent_usage_ttl_s: float = 3600.0
    start_timeout_s: float = 900.0
    shutdown_grace_s: float = 30.0
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    device: DeviceConfig = DeviceConfig()
    text: TextConfig = TextConfig()
    grammar: GrammarConfig = GrammarConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    parallel: ParallelConfig = ParallelConfig()
    registration: RegistrationConfig = RegistrationConfig()
    roles: list[Role] = []
    transfer: TransferConfig = TransferConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    addresses: list[ReplicaAddress] = []


class EmbeddingsConfig(_Section, frozen=True, kw_only=True):
    """The local replicas of an embedding model, on consecutive ports.

    ``model`` is the catalog id that they serve; empty means the first of ``models`` whose task is Text
    Embeddings. What else is here means what it means in
    :class:`backend.embeddings.config.EmbeddingReplicaConfig`.
    """

    count: int = 1
    host: str = "127.0.0.1"
    base_port: int = 8851
    model: str = ""
    max_body_bytes: int = 64 * 1024 * 1024
    max_batch_tokens: int = 4096
    max_waiting_inputs: int = 8192
    max_queue_wait_s: float = 30.0
    threads: int = 1
    shutdown_grace_s: float = 10.0
    max_recent_usages: int = 20_000
    recent_usage_ttl_s: float = 3600.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class SupervisorConfig(_Section, frozen=True, kw_only=True):
    """How ``embergate up`` watches its processes.

    A process that dies is started again after ``backoff_initial_s``, doubled with each death up to
    ``backoff_max_s`` and back to the start once it stayed up for ``stable_after_s``. One that dies
    ``max_start_failures`` times before everything was ready once ends ``up`` instead.
    """

    ready_timeout_s: float = 180.0
    probe_interval_s: float = 0.25
    backoff_initial_s: float = 0.5
    backoff_max_s: float = 30.0
    stable_after_s: float = 30.0
    max_start_failures: int = 3
    stop_timeout_s: float = 10.0
    log_max_bytes: int = 16 * 1024 * 1024
    log_num_backups: int = 3


class Config(_Section, frozen=True, kw_only=True):
    """The whole of ``config.yaml``. ``data_dir`` is relative to the file's own directory."""

    models: list[ModelConfig]
    data_dir: str = ".embergate"
    gateway: GatewayConfig = GatewayConfig()
    replicas: ReplicasConfig = ReplicasConfig()
    embeddings: EmbeddingsConfig = EmbeddingsConfig()
    billing: BillingConfig = BillingConfig()
    supervisor: SupervisorConfig = SupervisorConfig()

    @property
    def local_model(self) -> ModelConfig:
        """The catalog entry that the local replicas serve."""
        wanted = self.replicas.model
        return next(
            model
            for model in self.models
            if (model.id == wanted if wanted else model.task != EMBEDDINGS_TASK)
        )

    @property
    def embedding_model(self) -> ModelConfig | None:
        """The catalog entry that the local replicas of an embedding model serve; None when there are none."""
        wanted = self.embeddings.model
        models = [model for model in self.models if model.task == EMBEDDINGS_TASK]
        if not self.embeddings.count or not models:
            return None
        return next(model for model in models if model.id == wanted) if wanted else models[0]

    @property
    def gateway_url(self) -> str:
        """Where clients on this machine reach the gateway."""
        host = "127.0.0.1" if self.gateway.host in ("0.0.0.0", "::", "") else self.gateway.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.gateway.port}"

    def served_models(self) -> list[ServedModel]:
        """The models that some replica serves, as the gateway needs them."""
        return [
            ServedModel(
                id=model.id,
                aliases=model.aliases,
                max_model_len=model.max_model_len,
                default_max_tokens=model.default_max_tokens,
                default_temperature=model.default_temperature,
                default_top_p=model.default_top_p,
                description=model.description,
                task=model.task,
                created_at=model.created_at,
                tags=model.tags,
                properties=model.properties,
            )
            for model in self.models
            if self.is_served(model)
        ]

    def is_served(self, model: ModelConfig) -> bool:
        """Whether any replica serves the model; of those that come by themselves, any may."""
        may_come = self.gateway.registration.is_enabled and model.task != EMBEDDINGS_TASK
        return may_come or any(
            not address.models or model.id in address.models for address in self.replica_addresses()
        )

    def local_addresses(self) -> list[ReplicaAddress]:
        """The local replicas in the order of their index."""
        replicas = self.replicas
        return [
            ReplicaAddress(
                id=f"replica-{index}",
                url=f"http://{replicas.host}:{replicas.base_port + index}",
                models=[self.local_model.id],
            )
            for index in range(replicas.count)
        ]

    def replica_addresses(self) -> list[ReplicaAddress]:
        """Every replica that the gateway routes to: the local ones, then the external ones.

        An external one that lists no models serves all that generate text.
        """
        texts = [model.id for model in self.models if model.task != EMBEDDINGS_TASK]
        external = [
            address if address.models else msgspec.structs.replace(address, models=texts)
            for address in self.replicas.addresses
        ]
        return self.local_addresses() + self.embedding_addresses() + external

    def embedding_addresses(self) -> list[ReplicaAddress]:
        """The local replicas of the embedding model in the order of their index."""
        model, own = self.embedding_model, self.embeddings
        if model is None:
            return []
        return [
            ReplicaAddress(
                id=f"embeddings-{index}", url=f"http://{own.host}:{own.base_port + index}", models=[model.id]
            )
            for index in range(own.count)
        ]

    def embedding_config(self, index: int, *, model_path: Path, pool_token: str) -> EmbeddingReplicaConfig:
        """The configuration of local embedding replica ``index`` (from 0), which loads ``model_path``.

        Raises:
            ConfigError: when there is no such replica.
        """
        own, model = self.embeddings, self.embedding_model
        if model is None or not 0 <= index < own.count:
            raise ConfigError(f"there is no embedding replica {index}: see embeddings.count and models")
        alike = {
            field.name: getattr(own, field.name)
            for field in msgspec.structs.fields(EmbeddingsConfig)
            if field.name not in ("count", "base_port", "model")
        }
        return EmbeddingReplicaConfig(
            replica_id=f"embeddings-{index}",
            model_path=str(model_path),
            served_as=model.id,
            port=own.base_port + index,
            pool_token=pool_token,
            max_model_len=model.max_model_len,
            **alike,
        )

    def backend_config(
        self, index: int, *, model_path: Path, pool_token: str, replica_id: str = ""
    ) -> BackendConfig:
        """The configuration of local replica ``index`` (from 0), which loads ``model_path``.

        Args:
            replica_id: its name where a gateway elsewhere knows it by another (``replicas.addresses``).

        Raises:
            ConfigError: when ``replicas.count`` has no such replica.
        """
        if not 0 <= index < self.replicas.count:
            raise ConfigError(f"there is no replica {index}: replicas.count is {self.replicas.count}")
        replicas, model = self.replicas, self.local_model
        device = replicas.device
        if device.threads == 0:
            threads = max(1, (os.cpu_count() or 1) // replicas.count)
            device = msgspec.structs.replace(device, threads=threads)
        alike = {
            field.name: getattr(replicas, field.name)
            for field in msgspec.structs.fields(BackendConfig)
            if field.name not in OWN_FIELDS
        }
        alike["parallel"] = self._parallel(index)
        own = BackendConfig(
            replica_id=replica_id or self.local_addresses()[index].id,
            model=ModelSource(
                path=str(model_path),
                served_as=model.id,
                max_model_len=model.max_model_len,
                text_only=model.text_only,
            ),
            port=replicas.base_port + index,
            pool_token=pool_token,
            role=replicas.roles[index] if index < len(replicas.roles) else "both",
        )
        return msgspec.structs.replace(own, **{**alike, "device": device})

    def _parallel(self, index: int) -> ParallelConfig:
        """Which member of which crew local replica ``index`` is; the crews of one machine meet behind the
        replicas' ports.
        """
        replicas, own = self.replicas, self.replicas.parallel
        if own.data == 1:
            return own
        port = replicas.base_port + replicas.count + index // own.data
        return msgspec.structs.replace(
            own,
            data_rank=own.data_rank + index % own.data,
            meeting=own.meeting or f"127.0.0.1:{port}",
        )
