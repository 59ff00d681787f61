"""``embergate audit``"""

from __future__ import annotations

import click

from billing.audit import AuditReport
from billing.audit import audit as check_the_books
from embergate.commands.books import open_store, rate_book
from embergate.commands.context import with_settings
from embergate.config_file import Settings
from embergate.layout import DataLayout
from embergate.terminal import console, print_json


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
@click.pass_context
def audit(context: click.Context, settings: Settings, as_json: bool) -> None:
    """Prove that usage, prices and ledger agree.

    The exit code is 0 when they do and 1 on any drift.
    """
    with open_store(settings) as store:
        report = check_the_books(
            store, rate_book(settings), spool_directory=DataLayout(settings.data_dir).spool_dir
        )
    if as_json:
        print_json(report)
    else:
        _print(report, settings.config.billing.currency)
    context.exit(0 if report.is_clean else 1)


def _print(report: AuditReport, currency: str) -> None:
    out = console()
    out.print(
        f"{report.num_records:,} usage records, {report.num_transactions:,} transactions, "
        f"{report.num_entries:,} entries, {report.amount} {currency}"
    )
    for finding in report.findings:
        out.print(f"{finding.kind}  {finding.subject or '-'}  {finding.detail}", markup=False)
    if report.is_clean:
        out.print("[green]The books are right.[/]")
    else:
        out.print(f"[red]{report.num_findings:,} findings.[/]")
