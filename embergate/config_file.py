"""Reads ``config.yaml``: finds it, decodes it whole and strictly, and refuses what cannot be honoured.

Unknown keys, duplicate keys, wrong types and impossible values are each refused with the path of the key at
fault, as in ``gateway.prot: unknown key; did you mean port?``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import yaml

from billing.config import BillingConfigError
from billing.rates import RateBook
from billing.savings import price_lists
from embergate.config import Config, ConfigError
from gateway.config import EMBEDDINGS_TASK

CONFIG_VARIABLE = "EMBERGATE_CONFIG"
DATA_DIR_VARIABLE = "EMBERGATE_DATA_DIR"
MODEL_VARIABLE = "EMBERGATE_MODEL"
CONFIG_NAME = "config.yaml"

_MAX_CONFIG_BYTES = 1024 * 1024
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_ACCOUNT_ID = re.compile(r"[0-9a-f]{32}")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration together with where it was read and where its data lies."""

    config: Config
    path: Path
    data_dir: Path


def find_config(explicit: str | None, environ: Mapping[str, str], cwd: Path) -> Path:
    """Where the configuration is: ``--config``, then ``EMBERGATE_CONFIG``, then ``config.yaml`` here.

    Raises:
        ConfigError: when there is none.
    """
    named = explicit or environ.get(CONFIG_VARIABLE)
    path = cwd / (named or CONFIG_NAME)
    if path.is_file():
        return path.resolve()
    if named:
        raise ConfigError(f"{path}: there is no such configuration file")
    raise ConfigError(f"there is no {CONFIG_NAME} in {cwd}; go to the checkout or set {CONFIG_VARIABLE}")


def load_settings(explicit: str | None, environ: Mapping[str, str], cwd: Path) -> Settings:
    """Find and decode the configuration; ``EMBERGATE_DATA_DIR`` overrides ``data_dir`` and
    ``EMBERGATE_MODEL`` what the local replicas serve.

    Raises:
        ConfigError: when it is missing or cannot be used.
    """
    path = find_config(explicit, environ, cwd)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{path}: larger than {_MAX_CONFIG_BYTES} bytes")
    try:
        config = decode_config(raw)
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from error
    if model := environ.get(MODEL_VARIABLE):
        config = _serving(config, model)
    override = environ.get(DATA_DIR_VARIABLE)
    data_dir = (cwd / override) if override else (path.parent / Path(config.data_dir).expanduser())
    return Settings(config=config, path=path, data_dir=data_dir.resolve())


def _serving(config: Config, model: str) -> Config:
    """The configuration with another model for the local replicas."""
    if model not in {each.id for each in config.models}:
        known = ", ".join(each.id for each in config.models)
        raise ConfigError(f"{MODEL_VARIABLE}: {model} is not an id in models, which are {known}")
    replicas = msgspec.structs.replace(config.replicas, model=model)
    return msgspec.structs.replace(config, replicas=replicas)


def decode_config(raw: bytes) -> Config:
    """Decode and check the text of a configuration file.

    Raises:
        ConfigError: naming the key at fault, as in ``gateway.prot: unknown key; did you mean port?``.
    """
    try:
        tree = yaml.load(raw, Loader=_StrictLoader)  # _StrictLoader is a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{line}{error.problem or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError("expected a mapping of sections such as gateway: and models:")
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error))) from error
    for path, name, value in _numbers("", msgspec.to_builtins(config)):
        _check_number(path, name, value)
    _check_catalog(config)
    _check_replicas(config)
    _check_accounts(config)
    _check_billing(config)
    return config


class _StrictLoader(yaml.SafeLoader):
    """Refuses duplicate keys, and leaves dates as the text that they were written as."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice in one section", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}

_UNKNOWN_FIELD = re.compile(
    r"Object contains unknown field `(?P<field>[^`]*)`(?: - at `\$\.?(?P<path>.*)`)?$"
)
_MISSING_FIELD = re.compile(
    r"Object missing required field `(?P<field>[^`]*)`(?: - at `\$\.?(?P<path>.*)`)?$"
)
_AT_PATH = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>.*)`$")


def _explain(message: str) -> str:
    """Turn a decoder's message into ``path: what is wrong``."""
    if match := _UNKNOWN_FIELD.match(message):
        path, field = match["path"] or "", match["field"]
        near = difflib.get_close_matches(field, _known_fields(path), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{_join(path, field)}: unknown key{hint}"
    if match := _MISSING_FIELD.match(message):
        return f"{_join(match['path'] or '', match['field'])}: missing"
    if match := _AT_PATH.match(message):
        path, what = match["path"], match["what"].replace("`", "")
        return f"{path}: {what[:1].lower()}{what[1:]}{_hint(path, what)}"
    return message


def _hint(path: str, what: str) -> str:
    """What to write instead, where the type at ``path`` tells."""
    if what.startswith("Invalid enum value"):
        return f"; expected one of {', '.join(map(str, getattr(_type_at(path), '__args__', ())))}"
    if what.startswith("Expected str, got") and what.endswith(("float", "int")):
        return "; write it in quotes"
    return ""


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def _known_fields(path: str) -> list[str]:
    """Names of the keys of the section at a decoder's path such as ``gateway.limits.accounts[...]``."""
    section = _type_at(path)
    if isinstance(section, type) and issubclass(section, msgspec.Struct):
        return [field.encode_name for field in msgspec.structs.fields(section)]
    return []


def _type_at(path: str) -> Any:
    """The declared type of the key at a path such as ``models[0].form``, or None."""
    found: Any = Config
    for step in re.sub(r"\[[^\]]*\]", ".[]", path).split("."):
        if step:
            found = _step_into(found, step)
    return found


def _step_into(section: Any, step: str) -> Any:
    """The type below ``section`` at a key (or at ``[]``, an element of a list or mapping), or None."""
    if step == "[]":
        return getattr(section, "__args__", (None,))[-1]
    if isinstance(section, type) and issubclass(section, msgspec.Struct):
        for field in msgspec.structs.fields(section):
            if field.encode_name == step:
                return field.type
    return None


def _numbers(path: str, node: Any) -> Iterator[tuple[str, str, float]]:
    """Every number below ``node`` as (path, key, value)."""
    if isinstance(node, dict):
        for key, value in node.items():
            inner = _join(path, str(key))
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield inner, str(key), value
            else:
                yield from _numbers(inner, value)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _numbers(f"{path}[{index}]", value)


def _check_number(path: str, name: str, value: float) -> None:
    """Numbers are counts, sizes, times and ports: what their names say bounds them."""
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{path}: expected a number of at least 0, got {value}")
    if name in ("port", "base_port") and not 0 < value <= 65535:
        raise ConfigError(f"{path}: expected a port from 1 to 65535, got {value}")
    must_be_positive = name.startswith(("max_", "num_")) or name.endswith(
        (
            "_timeout_s",
            "interval_s",
            "lease_s",
            "_bytes",
            "_per_minute",
            "weight",
            "block_size",
            "memory_gib",
            "_max_tokens",
        )
    )
    if must_be_positive and value <= 0:
        raise ConfigError(f"{path}: expected a number above 0, got {value}")


def _check_catalog(config: Config) -> None:
    if not config.models:
        raise ConfigError("models: at least one model is needed")
    seen: dict[str, str] = {}
    for index, model in enumerate(config.models):
        names = [("id", model.id)] + [(f"aliases[{n}]", alias) for n, alias in enumerate(model.aliases)]
        for key, name in names:
            path = f"models[{index}].{key}"
            if not name:
                raise ConfigError(f"{path}: must not be empty")
            if name in seen:
                raise ConfigError(f"{path}: {name} is already taken by {seen[name]}")
            seen[name] = path
        if model.default_max_tokens > model.max_model_len:
            raise ConfigError(f"models[{index}].default_max_tokens: larger than max_model_len")
        if model.default_temperature > 2:
            raise ConfigError(f"models[{index}].default_temperature: expected at most 2")
        if not 0 < model.default_top_p <= 1:
            raise ConfigError(f"models[{index}].default_top_p: expected a number above 0 and at most 1")
        _check_date(f"models[{index}].created_at", model.created_at)
        ends = model.properties.get("planned_deprecation_date", "")
        _check_date(f"models[{index}].properties.planned_deprecation_date", ends)


def _check_date(path: str, text: str) -> None:
    try:
        is_date = not text or date.fromisoformat(text).isoformat() == text
    except ValueError:
        is_date = False
    if not is_date:
        raise ConfigError(f"{path}: expected a date such as 2026-01-27, got {text!r}")


def _check_replicas(config: Config) -> None:
    replicas = config.replicas
    ids = {model.id for model in config.models}
    _check_ports("replicas", replicas.base_port, replicas.count)
    _check_embeddings(config)
    if replicas.model and replicas.model not in ids:
        raise ConfigError(f"replicas.model: {replicas.model} is not an id in models")
    last_port = replicas.base_port + replicas.count - 1
    if replicas.host == config.gateway.host and replicas.base_port <= config.gateway.port <= last_port:
        raise ConfigError(f"gateway.port: {config.gateway.port} is also a replica's port")
    taken = {address.id for address in config.local_addresses() + config.embedding_addresses()}
    for index, address in enumerate(replicas.addresses):
        if address.id in taken:
            raise ConfigError(f"replicas.addresses[{index}].id: {address.id} is already taken")
        taken.add(address.id)
        if unknown := set(address.models) - ids:
            raise ConfigError(f"replicas.addresses[{index}].models: {min(unknown)} is not an id in models")
    _check_registration(config)
    _check_crews(config)
    if not any(map(config.is_served, config.models)):
        raise ConfigError("replicas: no replica serves any of models")
    device = replicas.device.device
    if not _DEVICE.fullmatch(device):
        raise ConfigError(f"replicas.device.device: expected auto, cpu, cuda or cuda:N, got {device!r}")


def _check_registration(config: Config) -> None:
    own = config.replicas.registration
    for index, gateway in enumerate(own.gateways):
        if not re.fullmatch(r"https?://[^/?#@]+/?", gateway):
            raise ConfigError(f"replicas.registration.gateways[{index}]: expected http://HOST:PORT")
    if own.gateways and not own.url and config.replicas.host in ("0.0.0.0", "::", ""):
        raise ConfigError(
            f"replicas.registration.url: needed, because replicas.host is {config.replicas.host!r}, "
            "where no gateway reaches a replica"
        )
    if own.gateways and not own.interval_s < own.lease_s:
        raise ConfigError("replicas.registration.lease_s: must be longer than interval_s")


def _check_crews(config: Config) -> None:
    """Replicas that share experts come in whole crews, unless some are on other machines."""
    own, count = config.replicas.parallel, config.replicas.count
    if own.data < 1:
        raise ConfigError("replicas.parallel.data: expected a number of at least 1, got 0")
    if own.data == 1:
        return
    if own.tensor * own.expert != 1:
        raise ConfigError("replicas.parallel.data: takes tensor 1 and expert 1")
    if not own.meeting and count % own.data:
        raise ConfigError(
            f"replicas.count: {count} replicas are no whole number of crews of parallel.data {own.data}; "
            "when some are on other machines, say where they meet (replicas.parallel.meeting)"
        )


def _check_ports(section: str, base_port: int, count: int) -> None:
    """Before anything is made for each of them: a slip of the finger may ask for a billion."""
    if base_port + count - 1 > 65535:
        raise ConfigError(f"{section}.count: {count} ports from {section}.base_port on run past 65535")


def _check_embeddings(config: Config) -> None:
    """Local replicas of either kind serve models of that kind; their ports do not collide."""
    own, replicas = config.embeddings, config.replicas
    kinds = {model.id: model.task == EMBEDDINGS_TASK for model in config.models}
    if own.model and not kinds.get(own.model, False):
        raise ConfigError(
            f"embeddings.model: {own.model} is not an id in models with the task Text Embeddings"
        )
    if kinds.get(replicas.model, False) or all(kinds.values()):
        raise ConfigError("replicas.model: expected a model that generates text; embeddings.model is another")
    if config.embedding_model is None:
        return
    _check_ports("embeddings", own.base_port, own.count)
    ports = range(own.base_port, own.base_port + own.count)
    others = {config.gateway.port, *range(replicas.base_port, replicas.base_port + replicas.count)}
    if taken := others.intersection(ports):
        raise ConfigError(f"embeddings.base_port: {min(taken)} is also the port of another process")


def _check_accounts(config: Config) -> None:
    for account_id in config.gateway.limits.accounts:
        if not _ACCOUNT_ID.fullmatch(account_id):
            raise ConfigError(f"gateway.limits.accounts.{account_id}: expected an account id, 32 hex digits")


def _check_billing(config: Config) -> None:
    """The counting house knows what it can price with."""
    try:
        RateBook.from_config(config.billing)
        price_lists(config.billing)
    except BillingConfigError as error:
        raise ConfigError(str(error)) from error
