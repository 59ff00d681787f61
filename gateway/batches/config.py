"""Configuration of asynchronous batches and files."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

AtLeastOne = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class BatchesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The queue of asynchronous batches. Bounds are per account where they do not say otherwise.

    What may be submitted: ``max_payload_bytes`` in one request, ``max_items`` in one batch, and
    ``max_open_batches`` with ``max_open_items`` together that have not ended. ``max_file_bytes`` bounds one
    uploaded file, ``max_stored_bytes`` all of them. ``deadline_s`` after its submission a batch expires;
    batches that have ended and files are deleted after ``retention_s``.

    How it is run: a replica gets at most ``max_in_flight_per_replica`` items from this gateway, and none
    while ``max_busy_in_flight`` of this gateway's requests are on it or one waits. ``lease_s`` is how long an
    item of a gateway that was killed waits for another; gateways' clocks must agree much better than that. An
    item whose attempts failed ``max_failures`` times has failed for good; between two it waits
    ``retry_initial_s``, doubled up to ``retry_max_s``. Items whose prompts share their first ``prefix_bytes``
    run on one replica.
    """

    is_enabled: bool = True
    max_payload_bytes: AtLeastOne = 10_000_000
    max_items: AtLeastOne = 50_000
    max_open_batches: AtLeastOne = 100
    max_open_items: AtLeastOne = 200_000
    max_file_bytes: AtLeastOne = 100 * 1024 * 1024
    max_stored_bytes: AtLeastOne = 1024 * 1024 * 1024
    deadline_s: Seconds = 86_400.0
    retention_s: Seconds = 604_800.0
    max_in_flight_per_replica: AtLeastOne = 8
    max_busy_in_flight: AtLeastOne = 12
    lease_s: Seconds = 30.0
    max_failures: AtLeastOne = 8
    retry_initial_s: Seconds = 1.0
    retry_max_s: Seconds = 60.0
    poll_interval_s: Seconds = 0.5
    sweep_interval_s: Seconds = 2.0
    prefix_bytes: AtLeastOne = 1024
