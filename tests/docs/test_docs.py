"""The documentation is complete and true: what it names exists, and what exists is named."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from embergate.__main__ import cli
from embergate.config_reference import list_settings, read_comments, render
from gateway.errors import Reason

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")]
    if page.is_file()
)
PATH = re.compile(r"`((?:[a-z_.]+/)+[A-Za-z0-9_.]*|[A-Za-z_]+\.(?:py|md|yaml|toml))`")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)]*)?\)")
ROUTE = re.compile(r'add_(get|post|put|delete)\(\s*"([^"]+)"')


def commands(group: click.Group, path: str) -> list[tuple[str, click.Command]]:
    """Every command that people use, with its full name."""
    found = []
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = f"{path} {name}"
        found += commands(command, inner) if isinstance(command, click.Group) else [(inner, command)]
    return found


def routes(folder: str) -> list[str]:
    """Method and path of every aiohttp route that a package adds, catch-alls aside."""
    sources = "\n".join(path.read_text() for path in sorted((ROOT / folder).rglob("*.py")))
    found = [f"{method.upper()} {path}" for method, path in ROUTE.findall(sources)]
    return [route for route in found if ":.*" not in route]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target, _ in LINK.findall(page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", ["docs/walkthrough.md", "docs/architecture.md", "README.md"])
def test_every_path_that_is_named_exists(page: str) -> None:
    data_directory = {"secrets/", "spool/", "models/", "logs/", "run/", "exports/"}
    text = (ROOT / page).read_text()
    paths = {path for path in PATH.findall(text) if "/" in path} - data_directory
    assert len(paths) > 5
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []


def test_the_walkthrough_visits_every_room() -> None:
    text = (ROOT / "docs/walkthrough.md").read_text()
    for room in ("gateway", "backend", "kernels", "billing", "embergate"):
        assert f"`{room}/" in text


@pytest.mark.parametrize("folder", ["gateway", "backend"])
def test_every_route_is_documented(folder: str) -> None:
    text = (ROOT / "docs/api.md").read_text()
    found = routes(folder)
    assert len(found) >= 4
    assert [route for route in found if f"`{route}`" not in text] == []


def test_the_hot_routes_are_documented() -> None:
    text = (ROOT / "docs/api.md").read_text()
    assert "`POST /client/v4/accounts/{account_id}/ai/run/{model}`" in text
    assert "`POST /client/v4/accounts/{account_id}/ai/v1/chat/completions`" in text


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.name)
def test_every_refusal_is_documented(reason: Reason) -> None:
    text = (ROOT / "docs/api.md").read_text()
    row = re.search(rf"^\| {reason.code} \| .*$", text, re.MULTILINE)
    assert row is not None
    assert str(reason.status) in row.group(0)


@pytest.mark.parametrize("command", commands(cli, "embergate"), ids=lambda command: command[0])
def test_every_command_and_option_is_documented(command: tuple[str, click.Command]) -> None:
    name, how = command
    rows = (ROOT / "docs/api.md").read_text().splitlines()
    row = next((row for row in rows if row.startswith((f"| `{name} ", f"| `{name}`"))), "")
    assert row, f"{name} is not in docs/api.md"
    for parameter in how.params:
        if isinstance(parameter, click.Option):
            assert max(parameter.opts, key=len) in row
    assert how.help, f"{name} has no help"


def test_the_first_line_of_help_is_the_same_in_the_list_and_in_the_command() -> None:
    context = click.Context(cli)
    listed = cli.get_help(context)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        assert command.help is not None
        first = " ".join(command.help.split("\n\n")[0].split())
        assert " ".join(first.split()[:4]) in " ".join(listed.split()), name


def test_every_setting_is_in_the_configuration_with_a_comment() -> None:
    comments = read_comments((ROOT / "config.yaml").read_text())
    assert [setting.path for setting in list_settings() if not comments.get(setting.path)] == []


def test_the_configuration_page_is_fresh() -> None:
    assert (ROOT / "docs/config.md").read_text() == render((ROOT / "config.yaml").read_text()), (
        "run `make docs`"
    )


def test_every_decision_is_in_the_index_and_no_other() -> None:
    index = (ROOT / "docs/decisions/README.md").read_text()
    pages = {page.name for page in (ROOT / "docs/decisions").glob("[0-9]*.md")}
    assert pages == set(re.findall(r"\(([0-9][^)]*\.md)\)", index)), "run `make docs`"
    for page in pages:
        title = (ROOT / "docs/decisions" / page).read_text().splitlines()[0]
        assert title.startswith(f"# {page[:4]}: ")
        assert f"[{title[2:]}]" in index, "run `make docs`"


def test_every_verb_of_the_makefile_explains_itself_and_the_readme_names_those_to_begin_with() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    assert phony is not None
    verbs = set(phony.group(1).replace("\\", "").split()) - {"fast-tests"}
    explained = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert verbs == explained
    readme = (ROOT / "README.md").read_text()
    for verb in ("up", "down", "help", "test", "test-fast", "load", "bench-engine", "bench-gateway"):
        assert f"make {verb}" in readme


@pytest.mark.parametrize(
    "room", ["embergate", "gateway", "backend", "kernels", "billing", "loadtest", "docs", "deploy", "tests"]
)
def test_nothing_names_a_path_of_one_machine_or_is_left_unfinished(room: str) -> None:
    signs = re.compile(r"/(work|tmp|root)/[a-z]|\b(TODO|FIXME)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / room).rglob("*"))
        if path.suffix in (".py", ".md", ".yaml", ".c", ".h") and path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if signs.search(line)
    ]
    assert found == []
