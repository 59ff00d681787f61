"""``python -m tests.bench.unmetered_gateway FILE``: the gateway, except that usage records go nowhere."""

from __future__ import annotations

import sys

from billing.usage import UsageRecord
from gateway.__main__ import main
from gateway.metering import UsageJournal


async def _forget(self: UsageJournal, record: UsageRecord) -> None:
    """What durable metering is measured against: the same path without the disk and the database."""


if __name__ == "__main__":
    UsageJournal.commit = _forget  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
