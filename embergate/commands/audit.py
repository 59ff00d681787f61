"""``embergate audit``"""

from __future__ import annotations

import click

from billing.audit import MAX_RECEIPTS, AuditReport
from billing.audit import audit as check_the_books
from billing.money import format_nanos
from embergate.commands.books import open_store, rate_book
from embergate.commands.context import with_settings
from embergate.config_file import Settings
from embergate.layout import DataLayout
from embergate.replica_usages import read_replica_usages
from embergate.terminal import console, print_json


@click.command()
@click.option("--replicas/--no-replicas", default=True, help="Also ask the replicas what they counted [yes].")
@click.option("--all-receipts", is_flag=True, help="Check every receipt, not the newest thousand.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
@click.pass_context
def audit(
    context: click.Context, settings: Settings, replicas: bool, all_receipts: bool, as_json: bool
) -> None:
    """Prove that usage, prices and ledger agree.

    So must the sums that reports read, credits, receipts, and what replicas counted. The exit code is 0 when
    they do and 1 on any drift.
    """
    layout = DataLayout(settings.data_dir)
    with open_store(settings) as store:
        # Replicas first: the books, read later, then hold whatever had ended.
        addresses = settings.config.replica_addresses() if replicas else []
        usages, silent = read_replica_usages(addresses, layout.secrets_dir)
        report = check_the_books(
            store,
            rate_book(settings),
            spool_directory=layout.spool_dir,
            replica_usages=usages,
            max_receipts=None if all_receipts else MAX_RECEIPTS,
        )
    if as_json:
        print_json(report)
    else:
        _print(report, silent, settings.config.billing.currency)
    context.exit(0 if report.is_clean else 1)


def _print(report: AuditReport, silent: list[str], currency: str) -> None:
    out = console()
    out.print(
        f"{report.num_records:,} usage records, {report.num_transactions:,} transactions, "
        f"{report.num_entries:,} entries, {report.amount} {currency}"
    )
    if report.credited_nanos:
        out.print(f"{format_nanos(report.credited_nanos)} {currency} paid in or given back")
    if report.num_replica_usages:
        out.print(f"{report.num_replica_usages:,} requests that replicas remember")
    if silent:
        out.print(f"not asked, as they do not answer: {', '.join(silent)}", markup=False)
    for finding in report.findings:
        out.print(f"{finding.kind}  {finding.subject or '-'}  {finding.detail}", markup=False)
    if report.is_clean:
        out.print("[green]The books are right.[/]")
    else:
        out.print(f"[red]{report.num_findings:,} findings.[/]")
