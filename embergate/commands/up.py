"""``embergate up``"""

from __future__ import annotations

import shlex

import click

from embergate.commands.context import with_settings
from embergate.config_file import Settings
from embergate.dev_account import DevAccount
from embergate.launch import detach, make_ready, supervise
from embergate.terminal import console, say, voice


@click.command()
@click.option(
    "--detach", "-d", "is_detached", is_flag=True, help="Return when all is ready; `down` stops it."
)
@with_settings
def up(settings: Settings, is_detached: bool) -> None:
    """Start one gateway and its replicas, and keep them running.

    Prepares the embedded model and the development account at the first start. Without --detach it stays in
    the foreground until Ctrl-C, which stops everything in order.
    """
    with voice() as speaker:
        lock, account = make_ready(settings, speaker)
    say(f"Starting one gateway and {settings.config.replicas.count} replicas ...")
    try:
        if is_detached:
            detach(settings, lock)
            print_welcome(settings, account, "`embergate down` (or make down) stops it.")
        else:
            supervise(settings, say, lambda: print_welcome(settings, account, "Ctrl-C stops it."))
            say("Stopped.")
    finally:
        lock.release()


def print_welcome(settings: Settings, account: DevAccount, how_to_stop: str) -> None:
    """Where everything is, and a first request to paste."""
    config, out = settings.config, console()
    out.print(f"\n[bold green]Embergate is ready.[/] {how_to_stop}\n")
    out.print(f"  gateway     {config.gateway_url}")
    for address in config.replica_addresses():
        out.print(f"  {address.id:<11} {address.url}")
    out.print(f"  model       {config.local_model.id}")
    out.print(f"  account id  {account.account_id}")
    out.print(f"  API token   {account.api_token}", markup=False)
    out.print(
        f"  all of it   set -a; . {shlex.quote(str(settings.data_dir / 'dev.env'))}; set +a\n", markup=False
    )
    out.print(first_request(account, config.local_model.id) + "\n", markup=False)


def first_request(account: DevAccount, model_id: str) -> str:
    """A request that works when pasted into a shell, and whose answer is the same each time."""
    return (
        f"curl -sS {account.url}/client/v4/accounts/{account.account_id}/ai/run/{model_id} \\\n"
        f"  -H 'Authorization: Bearer {account.api_token}' -H 'x-session-affinity: first' \\\n"
        '  -d \'{"messages":[{"role":"user","content":"What is the capital of France?"}],"temperature":0}\''
    )
