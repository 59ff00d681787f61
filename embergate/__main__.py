"""The command line: ``embergate COMMAND``."""

from __future__ import annotations

import importlib
import sys

import click

from embergate.config import ConfigError
from embergate.refusal import Refusal

_COMMANDS = {
    "up": ("embergate.commands.up:up", "Start one gateway and its replicas, and keep them running."),
    "down": ("embergate.commands.down:down", "Stop what runs, in order."),
    "status": ("embergate.commands.status:status", "Show which processes run and how they are."),
    "logs": ("embergate.commands.logs:logs", "Show what the processes wrote."),
    "serve": ("embergate.commands.serve:serve", "Run one process in the foreground, unsupervised."),
    "accounts": ("embergate.commands.accounts:accounts", "Create and list accounts."),
    "tokens": ("embergate.commands.tokens:tokens", "Create, list, revoke and import API tokens."),
    "usage": ("embergate.commands.usage:usage", "Show what was used, and what it costs."),
    "statement": ("embergate.commands.statement:statement", "Show an account's bill for a month."),
    "export": ("embergate.commands.export:export", "Write charged usage for other programs."),
    "savings": ("embergate.commands.savings:savings", "Show what caching saved, and other price lists."),
    "rollups": ("embergate.commands.rollups:rollups", "Check or rebuild the sums that reports read."),
    "credit": ("embergate.commands.credit:credit", "Book prepaid credit and credit notes."),
    "budgets": ("embergate.commands.budgets:budgets", "Limit what accounts and API tokens may spend."),
    "receipts": ("embergate.commands.receipts:receipts", "Show, sign and check receipts of single requests."),
    "audit": ("embergate.commands.audit:audit", "Prove that usage, prices and ledger agree."),
    "batches": ("embergate.commands.batches:batches", "Look at asynchronous batches, and cancel them."),
    "models": ("embergate.commands.models:models", "List the catalog, prepare models, plan large ones."),
    "trace": (
        "embergate.commands.trace:trace",
        "Record usage as a trace that can be replayed and simulated.",
    ),
    "simulate": (
        "embergate.commands.simulate:simulate",
        "Simulate a fleet: policies, sizes, failures, cost.",
    ),
    "supervise": ("embergate.commands.supervise:supervise", ""),
}
"""Name -> where the command is, and its line in ``--help``. Loaded when used, so that asking is quick."""

_OUR_PACKAGES = ("embergate", "gateway", "backend", "billing", "kernels", "simulator")


class _LazyGroup(click.Group):
    """Imports a command when it runs; listing them imports nothing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (_, line) in _COMMANDS.items() if line]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name][0].split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items() if line])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", metavar="FILE", help="The configuration file [EMBERGATE_CONFIG, ./config.yaml].")
@click.version_option(package_name="embergate")
@click.pass_context
def cli(context: click.Context, config: str | None) -> None:
    """A self-hosted Workers AI: gateway, replicas and ledger from one command."""
    context.obj = config


def main() -> None:
    """Run the command line; whatever goes wrong for a known reason ends in one sentence."""
    try:
        code = cli.main(prog_name="embergate", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except (Refusal, ConfigError) as error:
        _refuse(str(error), 1)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in _OUR_PACKAGES:
            raise
        _refuse(f"the package {error.name} is missing in this environment: run `make install`.", 1)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(message: str, code: int) -> None:
    click.echo(f"embergate: {message}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
