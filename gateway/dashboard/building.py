"""Puts the dashboard together for the composition root."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection

from billing.budgets import BudgetBook
from billing.config import BillingConfig
from billing.receipt_keys import KeyRing
from billing.receipts import Receipt, find_receipt
from billing.savings import price_lists
from billing.sign_outs import SignOuts
from billing.store import Store
from gateway.auth import Authenticator
from gateway.batches.archive import BatchArchive
from gateway.config import DashboardConfig
from gateway.dashboard.routes import DashboardRoutes, Sources
from gateway.dashboard.session import Sessions
from gateway.reading import UsageReader
from gateway.replicas import ReplicaTable
from gateway.secret_files import DASHBOARD_SECRET, load_or_create


def build_dashboard(
    config: DashboardConfig,
    billing: BillingConfig,
    data_dir: Path,
    *,
    store: Store,
    authenticator: Authenticator,
    reader: UsageReader,
    table: ReplicaTable,
    receipt_keys: KeyRing,
    salt_for: Callable[[str], str],
) -> list[DashboardRoutes]:
    """Its routes; none when it is switched off.

    Raises:
        BillingConfigError: a price to compare with is wrong.
        MissingChartsError: the charting library's package is not installed.
    """
    if not config.is_enabled:
        return []

    def receipt_for(connection: Connection, account_id: str, request_id: str) -> Receipt | None:
        salt = salt_for(account_id)
        return find_receipt(connection, account_id, request_id, cache_salt=salt, currency=billing.currency)

    sources = Sources(
        reader=reader,
        budgets=BudgetBook(store),
        sign_outs=SignOuts(store),
        batches=BatchArchive(store),
        table=table,
        price_lists=price_lists(billing),
        receipt_for=receipt_for,
        receipt_keys=receipt_keys,
        currency=billing.currency,
    )
    secret = load_or_create(data_dir / "secrets", DASHBOARD_SECRET)
    sessions = Sessions(secret, ttl_s=config.session_ttl_s, is_secure=config.is_cookie_secure)
    return [DashboardRoutes(authenticator, sources, sessions, config)]
