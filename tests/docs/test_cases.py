"""The page of known faults names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPLAINTS = (
    *("A1", "A2", "A3", "A4", "B1", "B3", "B4", "B5", "B7", "B8", "C1", "C2", "C3", "C5", "D1", "D3"),
    *("E1", "E2", "E3", "E4", "E6", "E7", "E8", "E10", "F1", "F3", "F4", "F5", "G2", "G3", "G4", "G6", "G7"),
)
"""All complaints about Workers AI that were collected."""
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


def test_every_complaint_about_workers_ai_has_a_row() -> None:
    page = (ROOT / "docs/cases.md").read_text()
    names = {
        name.strip() for cell in re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE) for name in cell.split(",")
    }
    assert [complaint for complaint in COMPLAINTS if complaint not in names] == []
