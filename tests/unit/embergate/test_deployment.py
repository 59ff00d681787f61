"""What ``deploy/`` holds is valid by the rules of those who read it, and agrees with the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import promql_parser
import pytest
import yaml

from backend.metrics import ReplicaMetrics
from embergate.__main__ import cli
from embergate.config import Config
from embergate.config_file import decode_config

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
MANIFESTS = [
    path
    for path in sorted((DEPLOY / "kubernetes" / "base").glob("*.yaml"))
    if "config" not in path.stem and path.stem != "kustomization"
]
CONFIGS = [DEPLOY / "config" / "gateway.yaml", DEPLOY / "kubernetes" / "base" / "gateway-config.yaml"]
REPLICA_CONFIGS = [DEPLOY / "config" / "replica.yaml", DEPLOY / "kubernetes" / "base" / "replica-config.yaml"]
SHARED_SECRETS = {"pool_token", "cache_salt_secret", "dashboard_secret"}


def run(*command: str) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).parent / command[0]), *command[1:]],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def objects(kind: str) -> dict[str, Any]:
    documents = [
        document
        for path in (DEPLOY / "kubernetes" / "base").glob("*.yaml")
        for document in yaml.safe_load_all(path.read_text())
        if document and document.get("kind") == kind
    ]
    return {document["metadata"]["name"]: document for document in documents}


def read(path: Path) -> Config:
    return decode_config(path.read_bytes())


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_meet_the_schemas_of_kubernetes(path: Path) -> None:
    run("kubernetes-validate", "--strict", "--kubernetes-version", "1.36", str(path))


def test_replicas_with_gpus_meet_them_too() -> None:
    patch = yaml.safe_load((DEPLOY / "kubernetes" / "gpu" / "replicas-on-gpus.yaml").read_text())
    base = objects(patch["kind"])[patch["metadata"]["name"]]
    patched = merged(base, patch)
    kubernetes_validate.validate(patched, "1.36", strict=True)
    (container,) = patched["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "128Gi", "nvidia.com/gpu": "1"}
    assert container["args"] == base["spec"]["template"]["spec"]["containers"][0]["args"]


def merged(base: Any, patch: Any) -> Any:
    """``patch`` laid over ``base`` as kustomize does it: lists of containers by their names."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {
            key: merged(base[key], value) if key in base else value for key, value in patch.items()
        }
    if isinstance(base, list) and all("name" in each for each in [*base, *patch]):
        patches = {each["name"]: each for each in patch}
        assert patches.keys() <= {each["name"] for each in base}
        return [merged(each, patches.get(each["name"], {})) for each in base]
    return patch


def test_the_compose_file_meets_the_specification() -> None:
    run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose.yaml"))


def test_the_image_is_built_as_linters_like_it() -> None:
    run("hadolint", str(DEPLOY / "Dockerfile"))


def test_the_image_gets_every_package_of_the_project() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "examples"}
    assert packages <= kept
    assert {"pyproject.toml", "constraints.txt", "README.md"} <= kept
    assert all((ROOT / name).exists() for name in kept)


@pytest.mark.parametrize("path", CONFIGS, ids=["compose", "kubernetes"])
def test_gateways_listen_everywhere_and_price_what_they_serve(path: Path) -> None:
    config = read(path)
    assert config.gateway.host == "0.0.0.0"
    assert config.billing.database_url.startswith("postgresql+psycopg://embergate@postgres:5432/embergate")
    assert {card.model for card in config.billing.rate_cards} == {
        model.id for model in config.served_models()
    }


def test_the_gateway_of_compose_finds_replicas_under_the_names_that_these_have() -> None:
    addresses = read(CONFIGS[0]).replica_addresses()
    assert {address.id: address.url for address in addresses} == {
        name: f"http://{name}.replicas:8801" for name in ("replica-0", "replica-1")
    }


def test_replicas_on_kubernetes_announce_themselves_to_every_gateway() -> None:
    gateway, replica = (read(paths[1]) for paths in (CONFIGS, REPLICA_CONFIGS))
    assert gateway.gateway.registration.is_enabled
    assert not gateway.replica_addresses()
    gateways = objects("StatefulSet")["gateway"]["spec"]
    assert replica.replicas.registration.gateways == [
        f"http://gateway-{index}.{gateways['serviceName']}:{gateway.gateway.port}"
        for index in range(gateways["replicas"])
    ]
    service = objects("StatefulSet")["replica"]["spec"]["serviceName"]
    assert replica.replicas.registration.url == f"http://{{id}}.{service}:{replica.replicas.base_port}"


@pytest.mark.parametrize("path", REPLICA_CONFIGS, ids=["compose", "kubernetes"])
def test_replicas_listen_where_gateways_look_for_them(path: Path) -> None:
    config = read(path)
    backend = config.backend_config(0, model_path=Path("/model"), pool_token="t", replica_id="replica-1")
    assert (backend.replica_id, backend.host, backend.port) == ("replica-1", "0.0.0.0", 8801)
    assert [model.id for model in config.models] == [model.id for model in read(CONFIGS[0]).models]


def test_compose_names_replicas_as_the_gateway_does_and_gives_everybody_the_secrets() -> None:
    services = compose()["services"]
    for name in ("replica-0", "replica-1"):
        assert services[name]["networks"]["pool"]["aliases"] == [f"{name}.replicas"]
        assert services[name]["command"] == ["serve", "replica", "--id", name]
        assert secrets_of(services[name]) == {"pool_token"}
    assert secrets_of(services["gateway"]) == SHARED_SECRETS
    assert "gateway:/var/lib/embergate" in services["gateway"]["volumes"]


def secrets_of(service: Any) -> set[str]:
    for secret in service["secrets"]:
        assert secret["target"] == f"/var/lib/embergate/secrets/{secret['source']}"
    return {secret["source"] for secret in service["secrets"]}


@pytest.mark.parametrize(("name", "config"), [("gateway", CONFIGS), ("replica", REPLICA_CONFIGS)])
def test_stops_are_given_longer_than_requests_in_flight(name: str, config: list[Path]) -> None:
    in_compose, in_kubernetes = (read(path) for path in config)
    service = compose()["services"]["gateway" if name == "gateway" else "replica-0"]
    pod = objects("StatefulSet")[name]["spec"]["template"]["spec"]
    grace_s = {
        "gateway": lambda read_config: read_config.gateway.shutdown_grace_s,
        "replica": lambda read_config: read_config.replicas.shutdown_grace_s,
    }[name]
    before = 10 if "lifecycle" in pod["containers"][0] else 0
    assert int(service["stop_grace_period"].removesuffix("s")) > grace_s(in_compose) + 10
    assert pod["terminationGracePeriodSeconds"] > grace_s(in_kubernetes) + before + 10


def test_probes_ask_routes_that_exist_on_ports_that_are_open() -> None:
    routes = {
        "gateway": set(re.findall(r'add_get\("(/\w+)"', (ROOT / "gateway/handlers/ops.py").read_text())),
        "replica": {"/health", "/metrics"},
    }
    for name, stateful in objects("StatefulSet").items():
        (container,) = stateful["spec"]["template"]["spec"]["containers"]
        ports = {port["name"] for port in container["ports"]}
        for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
            check = container[probe].get("httpGet") or container[probe]["tcpSocket"]
            assert check["port"] in ports
            assert check.get("path", "/health") in routes[name]


def test_every_pod_has_a_disruption_budget_and_no_rights() -> None:
    for name, stateful in objects("StatefulSet").items():
        labels = stateful["spec"]["template"]["metadata"]["labels"]
        assert objects("PodDisruptionBudget")[name]["spec"]["selector"]["matchLabels"] == labels
        pod = stateful["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        for container in [*pod["initContainers"], *pod["containers"]]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert "memory" in container["resources"]["limits"]


def test_containers_run_commands_that_exist() -> None:
    commands = [service["command"] for service in compose()["services"].values() if "command" in service]
    for stateful in objects("StatefulSet").values():
        commands += [each["args"] for each in stateful["spec"]["template"]["spec"]["containers"]]
    assert len(commands) == 5
    context = click.Context(cli)
    for group, name, *options in commands:
        command = cli.get_command(context, group)
        assert isinstance(command, click.Group)
        known = {option for parameter in command.commands[name].params for option in parameter.opts}
        assert {option for option in options if option.startswith("--")} <= known


def test_secrets_are_made_once_and_never_shown(tmp_path: Path) -> None:
    made = tmp_path / "secrets"
    for _ in range(2):
        done = subprocess.run(
            [DEPLOY / "make-secrets.sh", made], capture_output=True, text=True, timeout=10, check=True
        )
        assert done.stdout + done.stderr == ""
        contents = {path.name: path.read_text() for path in made.iterdir()}
    assert contents.keys() == SHARED_SECRETS | {"postgres.env", "gateway.env", "grafana.env"}
    assert {path.name: path.read_text() for path in made.iterdir()} == contents
    assert len({contents[name] for name in SHARED_SECRETS}) == 3
    assert all(re.fullmatch("[0-9a-f]{64}", contents[name]) for name in SHARED_SECRETS)
    password = contents["postgres.env"].partition("=")[2]
    assert contents["gateway.env"] == f"PGPASSWORD={password}"
    assert made.stat().st_mode & 0o777 == 0o700


def queries() -> Iterator[tuple[str, str]]:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "embergate.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "1m")
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def names_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:smg_|litellm_|vllm:|embergate_)[a-z0-9_:]+", query))


def known_names() -> set[str]:
    """Names as they are exposed: those in the code, and histograms and counters with their endings."""
    code = "".join(
        path.read_text() for room in ("gateway", "backend") for path in (ROOT / room).rglob("*.py")
    )
    stems = set(re.findall(r'"((?:smg_|litellm_|vllm:|embergate_)[a-z0-9_:]+)"', code))
    exposed = ReplicaMetrics("m", lambda: None).expose().decode()
    stems |= set(re.findall(r"^# TYPE (\S+)", exposed, re.MULTILINE))
    engine = (ROOT / "backend" / "metrics.py").read_text()
    stems |= {f"vllm:{name}" for name in re.findall(r'\(\s*"([a-z_]+)", "[A-Z]', engine)}
    return stems | {stem + end for stem in stems for end in ("_total", "_bucket")}


@pytest.mark.parametrize(("title", "query"), list(queries()), ids=lambda text: text[:24].replace(" ", "-"))
def test_dashboard_and_alerts_ask_for_what_is_measured(title: str, query: str) -> None:
    promql_parser.parse(query)
    assert names_in(query), title
    assert names_in(query) <= known_names()


def test_dashboard_panels_do_not_overlap() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "embergate.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells
