"""The parts of the example agents that need no model."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jsonschema
import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
DIFF = "--- a/src/a.py\n+++ b/src/a.py\n@@ -1 +1 @@\n-old\n+new\n--- a/gone.py\n+++ /dev/null\n"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Modules of the examples by name, as they import each other."""
    monkeypatch.setenv("EMBERGATE_URL", "http://gateway")
    monkeypatch.setenv("EMBERGATE_ACCOUNT_ID", "a")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names = ("agent_bill", "code_review", "security_review")
    modules = {name: importlib.import_module(name) for name in names}
    yield SimpleNamespace(**modules)
    for name in names:
        sys.modules.pop(name)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    for name in ("src/a.py", "src/b.py", "src/note.txt", "other.py"):
        (tmp_path / name).write_text(f"# {name}\n" * 50)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "."], check=True)
    return tmp_path


def walk(examples: Any, root: Path, **options: Any) -> Any:
    chosen = {"max_file_chars": 40, "max_files": 10, "focus": "secrets", "max_prefix_chars": 5_000}
    return examples.security_review.Walk(root, argparse.Namespace(**(chosen | options)))


class Books:
    """Stands for OpenAI's client: answers questions about savings, one request late."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def get(self, url: str, *, cast_to: object) -> Any:
        self.asked.append(url)
        num_requests = url.count("session=") - (len(self.asked) == 1)
        result = {
            "num_requests": num_requests,
            "tokens": {"num_input": 100, "num_cached": 300, "num_output": 5},
            "amount_nanos": 1_000,
            "undiscounted_nanos": 4_000,
            "comparisons": [{"name": "Other", "amount_nanos": 7_000}],
        }
        return {"result": result}


class TestBill:
    def test_it_waits_until_everything_is_on_the_books(self, examples: Any) -> None:
        books = Books()
        bill = examples.agent_bill.bill_of(books, 2, session=["one", "two"])
        assert books.asked == 2 * ["http://gateway/client/v4/accounts/a/ai/savings?session=one&session=two"]
        assert (bill.num_requests, bill.cached_share, bill.elsewhere) == (2, 0.75, {"Other": 7_000})
        text = "\n".join(bill.lines())
        assert "75.0% of them cached" in text
        assert "$0.000003 (75.0%)" in text

    def test_many_sessions_are_asked_for_in_parts(self, examples: Any) -> None:
        books = Books()
        bill = examples.agent_bill.bill_of(books, 119, session=[f"s{number}" for number in range(120)])
        assert [url.count("session=") for url in books.asked] == [50, 50, 20]
        assert (bill.amount, bill.elsewhere) == (3_000, {"Other": 21_000})

    def test_a_missing_variable_is_named(self, examples: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("EMBERGATE_URL")
        with pytest.raises(SystemExit, match="EMBERGATE_URL"):
            examples.agent_bill.connect()


class TestCodeReview:
    def test_changed_files_and_their_neighbours_can_be_read(self, examples: Any, repository: Path) -> None:
        seen = examples.code_review.Repository(repository, DIFF, max_files=9, max_chars=30)
        assert seen.changed == ["src/a.py"]
        assert seen.readable == ["src/a.py", "src/b.py", "src/note.txt"]
        assert seen.read("src/b.py") == ("# src/b.py\n" * 50)[:30]

    def test_nothing_else_can_be_read(self, examples: Any, repository: Path) -> None:
        diff = DIFF.replace("src/a.py", "../secret")
        seen = examples.code_review.Repository(repository / "src", diff, max_files=9, max_chars=30)
        for name in ("other.py", "../other.py", "../secret"):
            assert "is not one of the readable files" in seen.read(name)

    def test_without_a_change_there_is_nothing_to_review(self, examples: Any, repository: Path) -> None:
        with pytest.raises(SystemExit, match="no change"):
            examples.code_review.Repository(repository, "", max_files=9, max_chars=30)

    def test_a_review_meets_its_schema(self, examples: Any, repository: Path) -> None:
        seen = examples.code_review.Repository(repository, DIFF, max_files=9, max_chars=30)
        schema = examples.code_review.review_format(seen)["json_schema"]["schema"]
        finding = {"file": "src/a.py", "line": 1, "severity": "fault", "message": "wrong"}
        jsonschema.validate({"verdict": "comment", "summary": "short", "findings": [finding]}, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(
                {"verdict": "comment", "summary": "", "findings": [finding | {"file": "x"}]}, schema
            )


class TestSecurityReview:
    def test_requests_share_everything_but_the_last_message(self, examples: Any, repository: Path) -> None:
        files = walk(examples, repository)
        assert files.files == ["other.py", "src/a.py", "src/b.py"]
        first, second = (files.messages(name) for name in files.files[:2])
        assert first[:-1] == second[:-1]
        assert "src/note.txt" in first[0]["content"]
        assert first[-1]["content"].startswith("other.py:\n\n# other.py")

    def test_a_directory_without_git_is_walked_too(self, examples: Any, tmp_path: Path) -> None:
        (tmp_path / "b.py").write_text("b")
        (tmp_path / "a.py").write_text("a")
        assert walk(examples, tmp_path, max_files=1).files == ["a.py"]

    def test_an_answer_that_was_cut_is_no_report(self, examples: Any) -> None:
        def choice(reason: str) -> Any:
            return {"choices": [{"finish_reason": reason, "message": {"content": '{"risk": "none"}'}}]}

        assert examples.security_review.report_of(choice("stop")) == {"risk": "none"}
        assert examples.security_review.report_of(choice("length")) is None


@pytest.mark.parametrize("name", ["code_review", "security_review"])
def test_help_is_there(examples: Any, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module: ModuleType = getattr(examples, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", "--help"])
        with pytest.raises(SystemExit) as ended:
            module.options()
    assert ended.value.code == 0
    assert "--model" in capsys.readouterr().out
