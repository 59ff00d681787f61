"""The chat agent of the Agents SDK's starter under ``wrangler dev``: two turns over its WebSocket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.client_installation import ClientInstallation
from tests.support.client_packages import ClientPackages
from tests.support.installation import ALIAS, MODEL
from tests.support.wrangler_dev import wrangler_dev

SYSTEM = "You are a helpful assistant that answers every question about cities in one short sentence. " * 12
STARTER = {
    "compatibility_flags": ["nodejs_compat"],
    "durable_objects": {"bindings": [{"name": "ChatAgent", "class_name": "ChatAgent"}]},
    "migrations": [{"tag": "v1", "new_sqlite_classes": ["ChatAgent"]}],
    "vars": {"MODEL": ALIAS, "SYSTEM": SYSTEM},
}
"""What the starter's configuration has beside the binding."""


@pytest.fixture(scope="module")
def agent(
    packages: ClientPackages, installation: ClientInstallation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of the agent's Worker."""
    project = tmp_path_factory.mktemp("agent")
    with wrangler_dev(packages, "agent.js", project, installation.environment_of(), STARTER) as url:
        yield url


def test_the_second_turn_of_a_chat_agent_is_cached_by_the_affinity_it_sets(
    agent: str, packages: ClientPackages, installation: ClientInstallation
) -> None:
    seen = packages.run_node("agent_chat.mjs", {"AGENT_URL": agent})
    assert seen["roles"] == ["user", "assistant", "user", "assistant"]
    for turn in seen["turns"]:
        assert turn["text"]
        assert {"start", "text-delta", "finish"} <= set(turn["types"])
    first, second = installation.records(seen["affinity"], 2)
    assert {(record["surface"], record["model"]) for record in (first, second)} == {("binding", MODEL)}
    assert first["replica_id"] == second["replica_id"]
    assert first["cached_prompt_tokens"] == 0
    assert second["cached_prompt_tokens"] > 0.9 * first["prompt_tokens"]
