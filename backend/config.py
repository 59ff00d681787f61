"""Configuration of one replica. Torch-free: the gateway's supervisor reads it too."""

from __future__ import annotations

from typing import Literal

import msgspec


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configuration section: immutable, and a typo in a key is an error."""


class ModelSource(_Section, frozen=True):
    """What a replica loads.

    ``path`` is a directory with ``config.json``, safetensors and a tokenizer, or a GGUF file.
    ``served_as`` is the catalog id that answers and bills name. ``text_only`` leaves out a vision tower that
    the checkpoint has.
    """

    path: str
    served_as: str
    max_model_len: int = 8192
    text_only: bool = False


class TierConfig(_Section, frozen=True):
    """Where evicted KV blocks go: memory of the host (``host_gib``), then a disk (``disk_gib`` under
    ``path``, each replica in a directory of its own); 0 is no such tier.

    ``max_blocks_per_step`` are copied each way between two steps at most. ``max_queue_mib`` of blocks wait
    for the disk; more are dropped. A sequence waits for its blocks as long as computing them would take, at
    least ``min_promotion_s``, at most ``promotion_timeout_s``. A disk that refused a block is left alone for
    ``retry_after_s``. ``flush_s``: how long a stop writes what is not on the disk yet.
    """

    host_gib: float = 0.0
    disk_gib: float = 0.0
    path: str = ""
    max_blocks_per_step: int = 256
    max_queue_mib: float = 256.0
    min_promotion_s: float = 0.05
    promotion_timeout_s: float = 5.0
    retry_after_s: float = 60.0
    flush_s: float = 5.0


class CacheConfig(_Section, frozen=True):
    """The KV block pool. ``num_blocks`` null takes ``memory_gib`` of the device instead; both null take a
    share of the device: nine tenths of what is free on a GPU, an eighth of the machine's memory on a CPU.

    ``image_memory_gib``: embeddings of images kept for the next prompt that holds them.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_gib: float | None = None
    enable_prefix_cache: bool = True
    image_memory_gib: float = 0.25
    tiers: TierConfig = TierConfig()


class SchedulerConfig(_Section, frozen=True):
    """Budgets of one engine step and of the admission queue.

    ``max_mixed_step_s``: prefill beside sequences that decode is cut so that a step takes about this long
    (twice when more sequences wait for their first token than for the next, five times when none decodes);
    0 is no such limit. ``max_media_bytes``: pixels of the images of all running and waiting sequences.
    """

    max_tokens_per_step: int = 512
    max_mixed_step_s: float = 0.3
    max_running: int = 32
    max_waiting: int = 256
    max_queue_wait_s: float = 180.0
    max_media_bytes: int = 1 << 30


class DeviceConfig(_Section, frozen=True):
    """``device`` auto takes CUDA when there is one. ``threads`` 0 shares the cores among the replicas.

    ``weights``: how linear layers are held on a CPU: ``packed`` as the checkpoint has them (native kernels,
    fastest decode), ``float32`` dequantised; ``auto`` is packed when a C compiler is at hand.
    """

    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: int = 0
    weights: Literal["auto", "packed", "float32"] = "auto"


class TextConfig(_Section, frozen=True):
    """The text side of a replica. Sizes in characters.

    ``max_inline_chars``: a longer conversation is rendered and encoded in a thread, beside the event loop.
    ``encode_cache_chars``: encoded pieces of conversations kept for their next turn.
    ``max_image_bytes``: one image as a file; ``max_image_pixels``: decoded; ``max_image_tokens``: all images
    of a request together, times its choices.
    ``adds_default_system``: a conversation without a system message gets the one that earlier releases of
    Kimi put there.
    """

    max_inline_chars: int = 2048
    encode_cache_chars: int = 16_000_000
    max_stop_strings: int = 16
    max_stop_chars: int = 4096
    max_image_bytes: int = 20 * 1024 * 1024
    max_image_pixels: int = 40_000_000
    max_image_tokens: int = 16_384
    adds_default_system: bool = False


class GrammarConfig(_Section, frozen=True):
    """Answers held to a form (JSON schemas, tool calls that must be made). Sizes in characters.

    ``max_schema_chars``: all schemas of one request together. ``max_compile_s``: how long a request waits
    for its grammar. ``max_pending_compiles``: requests that may wait for one at a time. ``max_cached``:
    compiled grammars kept, in each of a replica's two processes. ``max_check_steps``: schemas evaluated in
    the second look at a whole answer; one that needs more is not judged.
    """

    max_schema_chars: int = 131_072
    max_compile_s: float = 10.0
    max_pending_compiles: int = 64
    max_cached: int = 256
    max_check_steps: int = 100_000


class SpeculationConfig(_Section, frozen=True):
    """Guesses of coming tokens by prompt lookup, confirmed by the model; answers stay the same.

    ``match_tokens`` last tokens of a sequence must have occurred in it before; up to ``max_draft_tokens`` of
    those that followed them then are guessed, fewer after wrong guesses.
    """

    enabled: bool = False
    max_draft_tokens: int = 8
    match_tokens: int = 3


class ParallelConfig(_Section, frozen=True):
    """Processes (ranks) that hold one replica's model together, ``tensor * expert`` of them.

    ``tensor`` of them share every matrix out, ``expert`` of them the experts. Or ``data``: so many whole
    replicas, each with its own sequences, cache and attention, that share the experts out among themselves
    (:mod:`backend.parallel.crew`); this one is number ``data_rank``, and they meet at ``meeting``, HOST:PORT.
    In ``config.yaml`` these two are of the first local replica, and of a free port on this machine.
    ``exchange_timeout_s``: a rank that the others wait for so long is lost, and the replica with it.
    """

    tensor: int = 1
    expert: int = 1
    data: int = 1
    data_rank: int = 0
    meeting: str = ""
    exchange_timeout_s: float = 120.0

    @property
    def world(self) -> int:
        return self.tensor * self.expert


class TransferConfig(_Section, frozen=True):
    """KV blocks between replicas; one takes part when its role is not ``both`` or ``is_enabled`` is set.

    It listens for others on ``port`` (null: any free one) of its host; ``address`` is what gateways hand on,
    with ``{id}`` for the replica's id, where that differs. ``buffer_mib`` of memory hold blocks on their way.
    ``max_blocks_per_step`` are copied between two steps at most; ``max_share`` of the KV cache may be kept
    for blocks on their way in. ``connect_timeout_s``, ``stall_timeout_s`` (nothing comes) and
    ``transfer_timeout_s`` (a prompt as a whole) end a transfer, and the prompt is computed where its answer
    is. ``lease_s``: how long a block is kept for somebody who does not come for it. ``links`` are tried in
    this order. ``linger_s``: how long a replica that drains and is done stays to hand over conversations.
    """

    is_enabled: bool = False
    port: int | None = None
    address: str = ""
    buffer_mib: int = 128
    max_transfers: int = 64
    max_frame_bytes: int = 64 * 1024 * 1024
    max_blocks_per_step: int = 16
    max_share: float = 0.5
    connect_timeout_s: float = 1.0
    stall_timeout_s: float = 15.0
    transfer_timeout_s: float = 120.0
    lease_s: float = 30.0
    linger_s: float = 10.0
    links: tuple[Literal["nixl", "memory", "tcp"], ...] = ("nixl", "memory", "tcp")


Role = Literal["both", "prefill", "decode"]
"""What a replica does of a request: all of it, only its prompt for others, or all for which no other is asked
to compute the prompt."""


class TelemetryConfig(_Section, frozen=True):
    otlp_endpoint: str = ""
    service_name: str = "embergate-replica"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class RegistrationConfig(_Section, frozen=True):
    """Which gateways are told of this replica, besides those that have it in their configuration.

    ``url`` is where they reach it, with ``{id}`` for the replica's id; empty means ``host`` and ``port``.
    ``weight`` null is the capacity: the tokens that its KV cache holds, in hundred thousands. A gateway that
    hears nothing for ``lease_s`` lets go of it.
    """

    gateways: list[str] = []
    url: str = ""
    weight: float | None = None
    interval_s: float = 2.0
    lease_s: float = 10.0
    timeout_s: float = 2.0


class BackendConfig(_Section, frozen=True):
    """One replica: an HTTP process and its engine.

    ``max_write_stall_s``: a reader that takes nothing for so long has its request aborted.
    """

    replica_id: str
    model: ModelSource
    host: str = "127.0.0.1"
    port: int = 8801
    pool_token: str = ""
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
    role: Role = "both"
    transfer: TransferConfig = TransferConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def exchanges_blocks(self) -> bool:
        """Whether blocks go to and come from other replicas."""
        return self.transfer.is_enabled or self.role != "both"
