"""The page of known faults names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def names_in(path: Path) -> set[str]:
    """Names of the tests in a file, those of classes too."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_every_case_has_a_test_that_exists() -> None:
    rows = [row for row in (ROOT / "docs/cases.md").read_text().splitlines() if re.match(r"\| [A-Z]", row)]
    assert len(rows) > 25
    for row in rows:
        named = TEST.findall(row)
        assert named, row
        for path, name in named:
            assert name in names_in(ROOT / path), f"{path}::{name}"
