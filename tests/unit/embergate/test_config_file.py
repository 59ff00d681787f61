"""The configuration file: read whole, refused precisely."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from backend.config import BackendConfig
from embergate.config import OWN_FIELDS, Config, ConfigError, ReplicasConfig
from embergate.config_file import decode_config, find_config, load_settings

ROOT = Path(__file__).parents[3]
MINIMAL = b"models: [{id: m}]\n"


def test_the_shipped_configuration_is_valid_and_says_only_defaults_outside_catalog_and_prices() -> None:
    shipped = decode_config((ROOT / "config.yaml").read_bytes())
    plain = Config(models=shipped.models)
    assert shipped.gateway == plain.gateway
    assert shipped.replicas == plain.replicas
    assert shipped.embeddings == plain.embeddings
    assert shipped.supervisor == plain.supervisor
    assert msgspec.structs.replace(shipped.billing, rate_cards=[], comparisons=[]) == plain.billing
    assert shipped.data_dir == plain.data_dir


def test_replicas_that_share_experts_know_their_places() -> None:
    config = decode_config(
        MINIMAL + b"replicas: {count: 4, base_port: 9000, parallel: {data: 2}}\ngateway: {port: 8000}\n"
    )
    places = [
        config.backend_config(index, model_path=Path("/m"), pool_token="").parallel for index in range(4)
    ]
    assert [(place.data_rank, place.meeting) for place in places] == [
        (0, "127.0.0.1:9004"), (1, "127.0.0.1:9004"), (0, "127.0.0.1:9005"), (1, "127.0.0.1:9005"),
    ]  # fmt: skip
    far = decode_config(
        MINIMAL + b"replicas: {count: 2, parallel: {data: 8, data_rank: 4, meeting: 'first:9999'}}"
    )
    place = far.backend_config(1, model_path=Path("/m"), pool_token="").parallel
    assert (place.data_rank, place.meeting) == (5, "first:9999")


def test_a_gateway_whose_replicas_come_by_themselves_serves_every_text_model() -> None:
    config = decode_config(
        b"models: [{id: a}, {id: b}, {id: e, task: Text Embeddings}]\n"
        b"gateway: {registration: {is_enabled: true}}\nreplicas: {count: 0}\nembeddings: {count: 0}\n"
    )
    assert [model.id for model in config.served_models()] == ["a", "b"]


def test_the_shipped_catalog_and_rate_cards_are_the_documented_ones() -> None:
    shipped = decode_config((ROOT / "config.yaml").read_bytes())
    model, embeddings, tiny = shipped.models
    assert (tiny.id, tiny.source, tiny.text_only) == ("kimi-k2.5-tiny", "tiny-int4", False)
    assert [each.id for each in shipped.served_models()] == [model.id, embeddings.id]
    assert (embeddings.id, embeddings.task) == (
        "@cf/sentence-transformers/all-minilm-l6-v2",
        "Text Embeddings",
    )
    assert shipped.embedding_model == embeddings
    assert model.id == "@cf/huggingface/smollm2-135m-instruct"
    assert model.form == "kimi"
    assert model.aliases == [f"@cf/moonshotai/kimi-{v}" for v in ("k2.5", "k2.6", "k2.7-code")]
    prices = {card.model: (card.input, card.cached_input, card.output) for card in shipped.billing.rate_cards}
    assert prices == {
        model.id: ("0.05", "0.01", "0.20"),
        embeddings.id: ("0.02025", None, "0"),
        tiny.id: ("0.05", "0.01", "0.20"),
        "@cf/moonshotai/kimi-k2.5": ("0.60", "0.10", "3.00"),
        "@cf/moonshotai/kimi-k2.6": ("0.95", "0.16", "4.00"),
        "@cf/moonshotai/kimi-k2.7-code": ("0.95", "0.19", "4.00"),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "expected a mapping of sections such as gateway: and models:"),
        (b"a: [", "line 1: expected the node content, but found '<stream end>'"),
        (b"gateway: {}", "models: missing"),
        (b"models: []", "models: at least one model is needed"),
        (
            MINIMAL + b"replicas: {count: 3, parallel: {data: 2}}",
            "replicas.count: 3 replicas are no whole number of crews of parallel.data 2; "
            "when some are on other machines, say where they meet (replicas.parallel.meeting)",
        ),
        (
            MINIMAL + b"replicas: {parallel: {data: 2, tensor: 2}}",
            "replicas.parallel.data: takes tensor 1 and expert 1",
        ),
        (
            MINIMAL + b"replicas: {registration: {gateways: ['gateway:8787']}}",
            "replicas.registration.gateways[0]: expected http://HOST:PORT",
        ),
        (
            MINIMAL + b"replicas: {host: 0.0.0.0, registration: {gateways: ['http://g:1']}}",
            "replicas.registration.url: needed, because replicas.host is '0.0.0.0', "
            "where no gateway reaches a replica",
        ),
        (
            MINIMAL + b"replicas: {registration: {gateways: ['http://g:1'], lease_s: 2, interval_s: 2}}",
            "replicas.registration.lease_s: must be longer than interval_s",
        ),
        (MINIMAL + b"gateway: {prot: 1}", "gateway.prot: unknown key; did you mean port?"),
        (MINIMAL + b"gatewya: {}", "gatewya: unknown key; did you mean gateway?"),
        (MINIMAL + b"gateway: {limits: {accounts: {ab: {burst: 1}}}}",
         "gateway.limits.accounts[...].burst: unknown key"),
        (b"models: [{id: m, alaises: []}]", "models[0].alaises: unknown key; did you mean aliases?"),
        (MINIMAL + b"gateway: {port: http}", "gateway.port: expected int, got str"),
        (MINIMAL + b"gateway: {port: '1'}", "gateway.port: expected int, got str"),
        (b"models: [{id: m, form: gguf}]",
         "models[0].form: invalid enum value 'gguf'; expected one of kimi, llama"),
        (MINIMAL + b"models: []", "line 2: the key 'models' stands twice in one section"),
        (MINIMAL + b"gateway: {port: 0}", "gateway.port: expected a port from 1 to 65535, got 0"),
        (MINIMAL + b"gateway: {upstream: {connect_timeout_s: -1}}",
         "gateway.upstream.connect_timeout_s: expected a number of at least 0, got -1.0"),
        (MINIMAL + b"gateway: {upstream: {connect_timeout_s: 0}}",
         "gateway.upstream.connect_timeout_s: expected a number above 0, got 0.0"),
        (MINIMAL + b"supervisor: {stable_after_s: .inf}",
         "supervisor.stable_after_s: expected a number of at least 0, got inf"),
        (b"models: [{id: m, aliases: [m]}]", "models[0].aliases[0]: m is already taken by models[0].id"),
        (b"models: [{id: ''}]", "models[0].id: must not be empty"),
        (b"models: [{id: m, max_model_len: 8}]", "models[0].default_max_tokens: larger than max_model_len"),
        (b"models: [{id: m, default_temperature: 3}]",
         "models[0].default_temperature: expected at most 2"),
        (b"models: [{id: m, default_top_p: 0}]",
         "models[0].default_top_p: expected a number above 0 and at most 1"),
        (b"models: [{id: m, created_at: '2026-1-27'}]",
         "models[0].created_at: expected a date such as 2026-01-27, got '2026-1-27'"),
        (b"models: [{id: m, properties: {planned_deprecation_date: soon}}]",
         "models[0].properties.planned_deprecation_date: expected a date such as 2026-01-27, got 'soon'"),
        (MINIMAL + b"replicas: {model: x}", "replicas.model: x is not an id in models"),
        (MINIMAL + b"replicas: {base_port: 8786}", "gateway.port: 8787 is also a replica's port"),
        (
            MINIMAL + b"replicas: {count: 1000000000}",
            "replicas.count: 1000000000 ports from replicas.base_port on run past 65535",
        ),
        (MINIMAL + b"replicas: {base_port: 65535}",
         "replicas.count: 2 ports from replicas.base_port on run past 65535"),
        (MINIMAL + b"replicas: {count: 0}", "replicas: no replica serves any of models"),
        (MINIMAL + b"replicas: {addresses: [{id: replica-0, url: 'http://h'}]}",
         "replicas.addresses[0].id: replica-0 is already taken"),
        (MINIMAL + b"replicas: {addresses: [{id: far, url: 'http://h', models: [x]}]}",
         "replicas.addresses[0].models: x is not an id in models"),
        (MINIMAL + b"gateway: {health: {probe_interval_s: 0}}",
         "gateway.health.probe_interval_s: expected a number above 0, got 0.0"),
        (MINIMAL + b"gateway: {limits: {accounts: {xyz: {}}}}",
         "gateway.limits.accounts.xyz: expected an account id, 32 hex digits"),
        (MINIMAL + b"replicas: {device: {device: tpu}}",
         "replicas.device.device: expected auto, cpu, cuda or cuda:N, got 'tpu'"),
        (MINIMAL + b"billing: {usd_per_thousand_neurons: '0'}",
         "billing.usd_per_thousand_neurons: must be more than 0"),
        (MINIMAL + b"billing: {rate_cards: [{model: m, effective_from: x, input: 0.5, output: '1'}]}",
         "billing.rate_cards[0].input: expected str, got float; write it in quotes"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_with_its_path(text: bytes, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        decode_config(text)
    assert str(refused.value) == message


def test_a_date_need_not_be_quoted() -> None:
    card = b"{model: m, effective_from: 2026-01-01, input: '1', output: '1'}"
    config = decode_config(MINIMAL + b"billing: {rate_cards: [" + card + b"]}")
    assert config.billing.rate_cards[0].effective_from == "2026-01-01"


def test_the_configuration_is_found_by_option_then_variable_then_directory(tmp_path: Path) -> None:
    for name in ("config.yaml", "a.yaml", "b.yaml"):
        (tmp_path / name).write_bytes(MINIMAL)
    variable = {"EMBERGATE_CONFIG": "b.yaml"}
    assert find_config("a.yaml", variable, tmp_path).name == "a.yaml"
    assert find_config(None, variable, tmp_path).name == "b.yaml"
    assert find_config(None, {}, tmp_path).name == "config.yaml"
    with pytest.raises(ConfigError, match="there is no such configuration file"):
        find_config("c.yaml", {}, tmp_path)
    with pytest.raises(ConfigError, match=r"there is no config\.yaml in .* set EMBERGATE_CONFIG"):
        find_config(None, {}, tmp_path / "elsewhere")


def test_the_data_directory_is_relative_to_the_file_and_overridden_by_the_environment(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.yaml").write_bytes(MINIMAL)
    assert load_settings(str(home / "config.yaml"), {}, tmp_path).data_dir == home / ".embergate"
    override = {"EMBERGATE_DATA_DIR": "data"}
    assert load_settings(str(home / "config.yaml"), override, tmp_path).data_dir == tmp_path / "data"


def test_another_model_is_served_when_the_environment_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"models: [{id: m}, {id: k, source: tiny-int4, text_only: true}]")
    plain = load_settings(None, {}, tmp_path).config
    assert (plain.local_model.id, [each.id for each in plain.served_models()]) == ("m", ["m"])
    other = load_settings(None, {"EMBERGATE_MODEL": "k"}, tmp_path).config
    assert (other.local_model.tiny_form, [each.id for each in other.served_models()]) == ("int4", ["k"])
    source = other.backend_config(0, model_path=Path("/k"), pool_token="").model
    assert (source.served_as, source.text_only) == ("k", True)
    with pytest.raises(ConfigError, match="EMBERGATE_MODEL: x is not an id in models, which are m, k"):
        load_settings(None, {"EMBERGATE_MODEL": "x"}, tmp_path)


def test_an_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"nonsense: 1")
    with pytest.raises(ConfigError, match=r"^config\.yaml: nonsense: unknown key$"):
        load_settings(None, {}, tmp_path)


def test_the_section_of_replicas_has_every_key_of_a_replica_with_its_default() -> None:
    here = {field.name: field for field in msgspec.structs.fields(ReplicasConfig)}
    for field in msgspec.structs.fields(BackendConfig):
        if field.name not in OWN_FIELDS:
            assert here[field.name].default == field.default, field.name


def test_each_replica_gets_its_own_name_and_port_and_its_share_of_the_cores() -> None:
    config = decode_config(MINIMAL + b"replicas: {count: 2, cache: {block_size: 8}}")
    first, second = (
        config.backend_config(i, model_path=Path("/checkpoint"), pool_token="t") for i in range(2)
    )
    assert (first.replica_id, first.port) == ("replica-0", 8801)
    assert (second.replica_id, second.port) == ("replica-1", 8802)
    assert first.model.path == "/checkpoint"
    assert first.model.served_as == "m"
    assert first.cache.block_size == 8
    assert first.pool_token == "t"
    assert first.device.threads >= 1
    with pytest.raises(ConfigError, match="there is no replica 2"):
        config.backend_config(2, model_path=Path("/checkpoint"), pool_token="t")


def test_the_gateway_is_reached_on_the_loopback_when_it_listens_everywhere() -> None:
    assert decode_config(MINIMAL + b"gateway: {host: 0.0.0.0}").gateway_url == "http://127.0.0.1:8787"
    assert decode_config(MINIMAL + b"gateway: {host: '::1'}").gateway_url == "http://[::1]:8787"


WITH_EMBEDDINGS = b"models: [{id: m}, {id: e, task: Text Embeddings}]\n"


def test_local_replicas_of_both_kinds_are_addressed_by_what_they_serve() -> None:
    config = decode_config(WITH_EMBEDDINGS + b"replicas: {addresses: [{id: far, url: 'http://h'}]}")
    served = {address.id: address.models for address in config.replica_addresses()}
    assert served == {"replica-0": ["m"], "replica-1": ["m"], "embeddings-0": ["e"], "far": ["m"]}
    assert config.local_model.id == "m"
    own = config.embedding_config(0, model_path=Path("/models/e"), pool_token="p")
    assert (own.replica_id, own.served_as, own.port, own.pool_token) == ("embeddings-0", "e", 8851, "p")
    with pytest.raises(ConfigError, match="there is no embedding replica 1"):
        config.embedding_config(1, model_path=Path("/models/e"), pool_token="p")


def test_without_an_embedding_model_there_is_no_replica_of_one() -> None:
    for text in (MINIMAL, WITH_EMBEDDINGS + b"embeddings: {count: 0}"):
        config = decode_config(text)
        assert config.embedding_model is None
        assert config.embedding_addresses() == []
        assert len(config.served_models()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            b"embeddings: {model: m}",
            "embeddings.model: m is not an id in models with the task Text Embeddings",
        ),
        (b"replicas: {model: e}", "replicas.model: expected a model that generates text"),
        (b"embeddings: {base_port: 8787}", "embeddings.base_port: 8787 is also the port of another process"),
        (b"embeddings: {base_port: 8802}", "embeddings.base_port: 8802 is also the port of another process"),
        (b"embeddings: {count: 2, base_port: 65535}", "embeddings.count: 2 ports from embeddings.base_port"),
    ],
)
def test_embeddings_that_cannot_be_are_refused(text: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        decode_config(WITH_EMBEDDINGS + text)
