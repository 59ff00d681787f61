"""``embergate models``"""

from __future__ import annotations

import click
import msgspec

from embergate.commands.context import with_settings
from embergate.commands.model_tools import make_tiny, plan
from embergate.config import ModelConfig
from embergate.config_file import Settings
from embergate.embedded_model import Form, find_damage, prepare
from embergate.embedding_model import find_damage as find_embedding_damage
from embergate.embedding_model import prepare_embeddings
from embergate.launch import source_path
from embergate.layout import DataLayout
from embergate.preflight import check_data_dir
from embergate.terminal import print_json, print_table, voice
from gateway.config import EMBEDDINGS_TASK


@click.group()
def models() -> None:
    """List the catalog, prepare models, plan large ones."""


models.add_command(make_tiny)
models.add_command(plan)


@models.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
def list_models(settings: Settings, as_json: bool) -> None:
    """List the models that clients can ask for."""
    rows = [_describe(settings, model) for model in settings.config.models]
    if as_json:
        print_json(rows)
        return
    print_table(
        ("id", "form", "source", "state", "replicas", "aliases"),
        [
            (row.id, row.form, row.source, row.state, ", ".join(row.replicas), ", ".join(row.aliases))
            for row in rows
        ],
    )


class CatalogRow(msgspec.Struct, frozen=True):
    """One model as it is listed."""

    id: str
    form: str
    source: str
    state: str
    replicas: list[str]
    aliases: list[str]


def _describe(settings: Settings, model: ModelConfig) -> CatalogRow:
    addresses = settings.config.replica_addresses()
    return CatalogRow(
        id=model.id,
        form=model.form,
        source=model.source,
        state=_state(settings, model),
        replicas=[address.id for address in addresses if not address.models or model.id in address.models],
        aliases=model.aliases,
    )


def _state(settings: Settings, model: ModelConfig) -> str:
    """Whether a model can be loaded as it is, in a word or a sentence."""
    if model.tiny_form is not None:
        is_there = DataLayout(settings.data_dir).tiny_checkpoint(model.tiny_form).exists()
        return "ready" if is_there else "prepared at the first start"
    if model.is_embedded and model.task == EMBEDDINGS_TASK:
        damage = find_embedding_damage(DataLayout(settings.data_dir).embedding_model)
        return "ready" if damage is None else "prepared at the first start"
    if not model.is_embedded:
        path = source_path(settings, model)
        return "ready" if path.exists() else f"missing: there is no {path}"
    checkpoint = DataLayout(settings.data_dir).embedded_checkpoint(model.form)
    if not checkpoint.exists():
        return "prepared at the first start"
    damage = find_damage(checkpoint)
    return "ready" if damage is None else f"prepared anew at the next start: {damage}"


@models.command(name="prepare")
@click.option(
    "--form",
    "forms",
    multiple=True,
    type=click.Choice(["kimi", "llama"]),
    help="Which form to write, several times for several [what config.yaml serves].",
)
@with_settings
def prepare_models(settings: Settings, forms: tuple[Form, ...]) -> None:
    """Download the embedded models once and write their checkpoints; mends what is damaged."""
    check_data_dir(settings.data_dir)
    texts = [model for model in settings.config.models if model.task != EMBEDDINGS_TASK]
    configured = list(dict.fromkeys(model.form for model in texts if model.is_embedded))
    embeddings = settings.config.embedding_model
    with voice() as speaker:
        for form in forms or configured:
            checkpoint = prepare(DataLayout(settings.data_dir), form, speaker.progress, speaker.say)
            speaker.say(f"{form}: ready in {checkpoint}")
        if embeddings is not None and embeddings.is_embedded:
            directory = prepare_embeddings(DataLayout(settings.data_dir), speaker.say)
            speaker.say(f"embeddings: ready in {directory}")
