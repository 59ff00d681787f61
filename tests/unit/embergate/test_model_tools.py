"""``embergate models make-tiny`` and ``plan``: what a person gets, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backend.text.kimi.vocabulary import rank_tokens, write_ranks
from backend.text.model_text import load_model_text
from tests.unit.embergate.conftest import CommandLine


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    path = tmp_path / "some.tiktoken"
    write_ranks(path, rank_tokens(word.encode() for word in ("he", "ll", "hell", "hello", " w", "or", "ld")))
    return path


@pytest.mark.parametrize("form", ["bf16", "fp8", "int4"])
def test_a_tiny_checkpoint_has_a_text_side_that_loads(
    command_line: CommandLine, tmp_path: Path, vocabulary: Path, form: str
) -> None:
    directory = tmp_path / form
    done = command_line.run(
        "models", "make-tiny", str(directory), "--format", form, "--tiktoken", str(vocabulary)
    )
    assert done.returncode == 0, done.stderr
    config = json.loads((directory / "config.json").read_text())
    assert config["model_type"] == "kimi_k25"
    vocab_size = config["text_config"]["vocab_size"]
    text = load_model_text(directory, cache_chars=0, vocab_size=vocab_size)
    assert len(text.token_bytes) == vocab_size == 263 + 256
    assert config["text_config"]["eos_token_id"] in text.stop_token_ids


def test_a_directory_with_something_in_it_is_left_alone(
    command_line: CommandLine, tmp_path: Path, vocabulary: Path
) -> None:
    done = command_line.run(
        "models", "make-tiny", str(tmp_path), "--format", "bf16", "--tiktoken", str(vocabulary)
    )
    assert done.returncode == 1
    assert done.stderr == f"embergate: {tmp_path} is not empty: name a new directory.\n"


def test_a_vocabulary_that_is_none_is_named(command_line: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("three words here")
    done = command_line.run(
        "models", "make-tiny", str(tmp_path / "new"), "--format", "bf16", "--tiktoken", str(tmp_path / "bad")
    )
    assert done.returncode == 1
    assert "bad: line 1 is not a token and its id" in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_plan_is_printed_for_people_and_for_programs(
    command_line: CommandLine, tmp_path: Path, vocabulary: Path
) -> None:
    directory = str(tmp_path / "tiny")
    command_line.run("models", "make-tiny", directory, "--format", "int4", "--tiktoken", str(vocabulary))
    done = command_line.run("models", "plan", directory, "--gpus", "1xH200")
    assert done.returncode == 0, done.stderr
    assert "768 bytes" in done.stdout
    assert "the same on every rank" in done.stdout
    printed = command_line.run("models", "plan", directory, "--gpus", "1xH200", "--json")
    figures = json.loads(printed.stdout)
    assert figures["kv_bytes_per_token"] == 768
    assert f"{figures['kv_tokens']:,} tokens" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--gpus", "many"), "'many': write it as in 8xH200 or 4x48GB"),
        (("--gpus", "1x0.001GB", "--reserve-gib", "0"), "does not fit"),
        (("--gpus", "1xH200", "--reserve-gib", "nan"), "'--reserve-gib': nan is no"),
        (("--gpus", "3xH200"), "num_attention_heads: 4 cannot be cut into 3 parts"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(
    command_line: CommandLine,
    tmp_path: Path,
    vocabulary: Path,
    arguments: tuple[str, ...],
    complaint: str,
) -> None:
    directory = str(tmp_path / "tiny")
    command_line.run("models", "make-tiny", directory, "--format", "int4", "--tiktoken", str(vocabulary))
    done = command_line.run("models", "plan", directory, *arguments)
    assert done.returncode != 0
    assert complaint in done.stderr.replace("\n", " ")


def test_a_directory_without_a_model_cannot_be_planned(command_line: CommandLine, tmp_path: Path) -> None:
    done = command_line.run("models", "plan", str(tmp_path), "--gpus", "8xH200")
    assert done.returncode == 1
    assert "config.json: missing" in done.stderr


def test_a_seed_beyond_all_bounds_is_named(command_line: CommandLine, tmp_path: Path) -> None:
    done = command_line.run(
        "models", "make-tiny", str(tmp_path / "new"), "--format", "bf16", "--seed", "9" * 30
    )
    assert done.returncode == 2
    assert "'--seed'" in done.stderr
