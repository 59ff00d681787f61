"""``embergate serve gateway`` and ``embergate serve replica``

Each process imports its own half of the house only: no torch in the gateway, no ledger in a replica.
"""

from __future__ import annotations

import os

import click

from billing.spool import SpoolError
from billing.store import StoreError
from embergate.commands.context import with_settings
from embergate.config_file import Settings
from embergate.eyesight import served_models
from embergate.launch import resolve_embedding_model, resolve_model
from embergate.layout import DataLayout
from embergate.lifeline import LIFELINE_VARIABLE, hold_lifeline
from embergate.refusal import Refusal
from embergate.terminal import voice
from gateway.secret_files import POOL_TOKEN, load_or_create


@click.group()
def serve() -> None:
    """Run one process in the foreground, unsupervised."""


@serve.command()
@with_settings
def gateway(settings: Settings) -> None:
    """Run the gateway."""
    _hold(settings.config.gateway.shutdown_grace_s)
    from gateway.app import run

    config = settings.config
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    try:
        run(
            config.gateway,
            served_models(settings),
            config.replica_addresses(),
            config.billing,
            settings.data_dir,
        )
    except (StoreError, SpoolError, OSError, ValueError) as error:
        raise Refusal(f"the gateway cannot start: {error}") from error


@serve.command()
@click.option(
    "--index", type=click.IntRange(min=0), default=0, show_default=True, help="Which local replica."
)
@click.option(
    "--id", "replica_id", metavar="NAME", help="What gateways elsewhere call it in replicas.addresses."
)
@with_settings
@click.pass_context
def replica(context: click.Context, settings: Settings, index: int, replica_id: str | None) -> None:
    """Run one local replica."""
    _hold(settings.config.replicas.shutdown_grace_s)
    from backend.__main__ import run

    with voice() as speaker:
        model_path = resolve_model(settings, speaker)
    pool_token = load_or_create(DataLayout(settings.data_dir).secrets_dir, POOL_TOKEN)
    config = settings.config.backend_config(
        index, model_path=model_path, pool_token=pool_token, replica_id=replica_id or ""
    )
    context.exit(run(config))


@serve.command()
@click.option(
    "--index", type=click.IntRange(min=0), default=0, show_default=True, help="Which embedding replica."
)
@with_settings
@click.pass_context
def embeddings(context: click.Context, settings: Settings, index: int) -> None:
    """Run one local replica of the embedding model."""
    config = settings.config
    _hold(config.embeddings.shutdown_grace_s)
    from backend.embeddings.server import run

    if config.embedding_model is None:
        raise Refusal("no embedding model is configured: see models and embeddings.count in config.yaml.")
    with voice() as speaker:
        model_path = resolve_embedding_model(settings, config.embedding_model, speaker)
    pool_token = load_or_create(DataLayout(settings.data_dir).secrets_dir, POOL_TOKEN)
    context.exit(run(config.embedding_config(index, model_path=model_path, pool_token=pool_token)))


def _hold(grace_s: float) -> None:
    """Under a supervisor, do not outlive it."""
    if os.environ.get(LIFELINE_VARIABLE):
        hold_lifeline(grace_s + 5.0)
