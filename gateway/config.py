"""Configuration of the edge. Every queue, cache, wait and body has its limit here.

Units stand last in the names. Unknown keys are refused with their path by whoever decodes the file.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from gateway.batches.config import BatchesConfig

AtLeastOne = Annotated[int, Meta(ge=1)]

TEXT_TASK: Final = "Text Generation"
EMBEDDINGS_TASK: Final = "Text Embeddings"
Task = Literal["Text Generation", "Text Embeddings"]
"""What a model does, in the words of the catalog of Workers AI."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configuration section: immutable, and a typo in a key is an error."""


class ReplicaAddress(_Section, frozen=True):
    """One replica that the gateway can route to."""

    id: str
    url: str
    weight: Annotated[float, Meta(gt=0)] = 1.0
    models: list[str] = []


class ServedModel(_Section, frozen=True):
    """A catalog entry: ``aliases`` are other ids that clients may use for it; bills name ``id``.

    ``sees_images`` null: nobody here has looked at the checkpoint, so its replicas decide. ``created_at`` is
    a date or "", ``properties`` are what the catalog says beyond what follows from the rest.
    """

    id: str
    aliases: list[str] = []
    sees_images: bool | None = None
    max_model_len: int = 8192
    default_max_tokens: int = 256
    default_temperature: float = 1.0
    default_top_p: float = 1.0
    description: str = ""
    task: Task = TEXT_TASK
    created_at: str = ""
    tags: list[str] = []
    properties: dict[str, str] = {}


class RoutingConfig(_Section, frozen=True):
    """``max_in_flight`` requests per replica before a request spills to the next in rank.

    When every replica is full, at most ``max_waiting`` requests wait, each at most ``capacity_wait_s``,
    before they are refused. ``max_tracked_sessions`` bounds the table that predicts cached tokens.

    Where there are replicas of the role prefill: a prompt with ``min_split_tokens`` or more that are probably
    not cached where its answer is (by about four bytes a token) is computed by one of them, as long as that
    has fewer than ``max_prefills_per_replica`` to compute.

    A conversation whose previous turn had ``min_handover_tokens`` of prompt and that another replica answers
    now is handed over by its previous owner, where both exchange blocks.
    """

    policy: Literal["rendezvous", "ring"] = "rendezvous"
    max_in_flight: int = 256
    max_attempts: int = 3
    capacity_wait_s: float = 10.0
    max_waiting: int = 1024
    max_tracked_sessions: int = 50_000
    min_split_tokens: AtLeastOne = 256
    max_prefills_per_replica: AtLeastOne = 16
    min_handover_tokens: AtLeastOne = 64


class UpstreamConfig(_Section, frozen=True):
    """Bounds of one request to a replica. ``idle_timeout_s`` ends a stream that stalls,
    ``keepalive_timeout_s`` closes a connection that no request has used for so long."""

    connect_timeout_s: float = 2.0
    first_byte_timeout_s: float = 300.0
    idle_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    keepalive_timeout_s: float = 60.0
    max_connections_per_replica: int = 512
    max_response_bytes: int = 64 * 1024 * 1024


class HealthConfig(_Section, frozen=True):
    probe_interval_s: float = 0.5
    probe_timeout_s: float = 2.0
    failures_to_down: int = 2


class RegistrationConfig(_Section, frozen=True):
    """Replicas that announce themselves (:mod:`gateway.registrations`). ``max_clock_skew_s``: how far their
    clocks may be from the gateway's.
    """

    is_enabled: bool = False
    max_replicas: AtLeastOne = 4096
    max_lease_s: Annotated[float, Meta(gt=0)] = 300.0
    max_clock_skew_s: Annotated[float, Meta(gt=0)] = 30.0


class RateLimits(_Section, frozen=True):
    """Limits of one account. ``requests_per_minute`` and ``tokens_per_minute`` are buckets per account and
    model; null does not limit tokens. ``embedding_requests_per_minute`` holds for embedding models
    instead.

    ``stops_at_free_neurons``: when the day's free neurons are used up, requests are refused, not charged.
    """

    requests_per_minute: AtLeastOne = 300
    embedding_requests_per_minute: AtLeastOne = 3000
    burst_requests: AtLeastOne | None = None
    max_concurrent_requests: AtLeastOne = 64
    tokens_per_minute: AtLeastOne | None = None
    stops_at_free_neurons: bool = False


class LimitsConfig(_Section, frozen=True):
    """``accounts`` overrides ``default`` for single account ids; ``max_choices`` bounds ``n`` of one
    request, ``max_embedding_inputs`` its texts. ``neurons_refresh_s`` is how often the neurons that other
    gateways counted are looked up.
    """

    default: RateLimits = RateLimits()
    accounts: dict[str, RateLimits] = {}
    max_choices: int = 8
    max_embedding_inputs: AtLeastOne = 2048
    max_tracked_buckets: int = 100_000
    neurons_refresh_s: Annotated[float, Meta(gt=0)] = 30.0


class ImagesConfig(_Section, frozen=True):
    """Images in messages. What one may be (bytes, pixels, tokens) is the replica's business; here is how many
    a request may hold, and which may be fetched for it.

    ``allowed_hosts`` empty means that nothing is fetched. An entry is a host name, ``*.`` before one for all
    below it, each with an optional ``:port``. They may resolve to public addresses, and to those in
    ``allowed_networks`` (CIDR). ``max_fetched_bytes``: of all that are fetched for a request together.
    ``fetch_timeout_s`` bounds one fetch as a whole, waiting for one of the
    ``max_concurrent_fetches`` of the gateway included.
    """

    max_per_request: AtLeastOne = 64
    allowed_hosts: list[str] = []
    allowed_networks: list[str] = []
    allows_plain_http: bool = False
    max_fetched_per_request: AtLeastOne = 8
    max_fetched_bytes: AtLeastOne = 20 * 1024 * 1024
    max_concurrent_fetches: AtLeastOne = 16
    fetch_timeout_s: Annotated[float, Meta(gt=0)] = 10.0


class BudgetsConfig(_Section, frozen=True):
    """``refresh_s`` is how soon a budget that was set or changed holds here. A gateway that is gone for good
    keeps its part of shared budgets for ``lease_s``.
    """

    refresh_s: Annotated[float, Meta(gt=0)] = 2.0
    lease_s: Annotated[float, Meta(gt=0)] = 60.0


class AuthConfig(_Section, frozen=True):
    """``cache_ttl_s`` bounds how long a revoked API token can still be used."""

    cache_ttl_s: float = 2.0
    max_cached_tokens: int = 10_000


class MeteringConfig(_Section, frozen=True):
    """``commit_interval_s`` is how long a group commit waits at most for company, which it does as long as
    the edge is busy with more requests. The commit of a lone request goes without a thread of its own while
    commits take less than ``inline_commit_max_s``; 0 turns that off.

    ``abort_usage_wait_s`` bounds how long a replica is asked for the usage of a request whose client left,
    ``stop_usage_wait_s`` the same while the gateway stops; ``max_known_requests`` how many finished requests
    are remembered while usages are reconciled.
    """

    commit_interval_s: float = 0.001
    inline_commit_max_s: float = 0.005
    max_group: int = 512
    max_pending: int = 20_000
    commit_timeout_s: float = 10.0
    abort_usage_wait_s: float = 15.0
    stop_usage_wait_s: float = 2.0
    max_known_requests: int = 50_000


class MarkdownConfig(_Section, frozen=True):
    """Documents to Markdown. Each conversion is a process of its own, ended after ``timeout_s`` or when it
    needs more than ``max_memory_mib``; at most ``max_waiting`` documents wait for one of ``max_concurrent``
    processes, each at most ``wait_s``.
    """

    max_files: AtLeastOne = 16
    max_file_bytes: AtLeastOne = 10 * 1024 * 1024
    max_output_bytes: AtLeastOne = 16 * 1024 * 1024
    max_memory_mib: AtLeastOne = 1024
    max_concurrent: AtLeastOne = 2
    max_waiting: AtLeastOne = 32
    timeout_s: Annotated[float, Meta(gt=0)] = 20.0
    wait_s: Annotated[float, Meta(gt=0)] = 30.0


class TelemetryConfig(_Section, frozen=True):
    """``otlp_endpoint`` empty means: no spans are made and nothing is paid for them.

    Metrics name at most ``max_account_labels`` accounts; further ones count under ``other``.
    """

    otlp_endpoint: str = ""
    max_account_labels: int = 200
    service_name: str = "embergate-gateway"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    access_log: bool = True


class AnalyticsConfig(_Section, frozen=True):
    """Questions about usage, which run in threads beside the event loop.

    ``max_page_rows`` bounds a page of the usage API, ``max_rows`` a GraphQL list. ``max_query_bytes``,
    ``max_query_depth`` and ``max_query_fields`` bound a GraphQL query.
    """

    max_concurrent_reads: AtLeastOne = 4
    max_waiting_reads: int = 64
    read_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    max_page_rows: AtLeastOne = 1_000
    max_rows: AtLeastOne = 10_000
    max_query_bytes: AtLeastOne = 65_536
    max_query_depth: AtLeastOne = 15
    max_query_fields: AtLeastOne = 500


class DashboardConfig(_Section, frozen=True):
    """The pages below ``/dashboard``. ``is_cookie_secure`` lets browsers send the session over HTTPS only.

    ``num_requests`` rows stand on a page of requests or batches; ``num_replica_requests`` of the newest
    requests tell what replicas hit.
    """

    is_enabled: bool = True
    session_ttl_s: AtLeastOne = 43_200
    is_cookie_secure: bool = False
    num_requests: AtLeastOne = 50
    num_replica_requests: AtLeastOne = 20_000


class GatewayConfig(_Section, frozen=True):
    """The edge as one process. ``max_buffered_body_bytes`` bounds the bodies of all requests together;
    ``public_url`` is where clients reach it, when that is not ``host`` and ``port``.
    """

    host: str = "127.0.0.1"
    port: int = 8787
    public_url: str = ""
    max_body_bytes: int = 32 * 1024 * 1024
    max_buffered_body_bytes: int = 512 * 1024 * 1024
    max_header_bytes: int = 32 * 1024
    max_connections: int = 8192
    keepalive_timeout_s: float = 75.0
    read_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    write_buffer_bytes: int = 256 * 1024
    shutdown_grace_s: float = 30.0
    routing: RoutingConfig = RoutingConfig()
    upstream: UpstreamConfig = UpstreamConfig()
    health: HealthConfig = HealthConfig()
    registration: RegistrationConfig = RegistrationConfig()
    limits: LimitsConfig = LimitsConfig()
    images: ImagesConfig = ImagesConfig()
    budgets: BudgetsConfig = BudgetsConfig()
    auth: AuthConfig = AuthConfig()
    metering: MeteringConfig = MeteringConfig()
    batches: BatchesConfig = BatchesConfig()
    markdown: MarkdownConfig = MarkdownConfig()
    analytics: AnalyticsConfig = AnalyticsConfig()
    dashboard: DashboardConfig = DashboardConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
