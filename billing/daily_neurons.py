"""How many neurons each account has used in a day, as far as the ledger knows."""

from __future__ import annotations

from sqlalchemy import func, select

from billing.schema import rollup_days
from billing.store import Store


def used_neurons(store: Store, day_start_us: int) -> dict[str, int]:
    """Ten-thousandths of a neuron by account, of requests that started in the UTC day that begins at
    ``day_start_us``. Raises StoreError.
    """
    columns = rollup_days.c
    query = (
        select(columns.account_id, func.sum(columns.neurons_e4))
        .where(columns.start_us == day_start_us)
        .group_by(columns.account_id)
    )
    with store.reading() as connection:
        return {account_id: int(neurons_e4) for account_id, neurons_e4 in connection.execute(query)}
