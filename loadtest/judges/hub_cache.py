"""A tokenizer on disk as an entry of a Hugging Face cache, which a program in offline mode finds by name.

Both judges load tokenizers by name, and one of them in worker processes that take nothing else.
"""

from __future__ import annotations

from pathlib import Path

NAME = "local/tokenizer"
_REVISION = "0" * 40
_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")


class TokenizerError(ValueError):
    """The directory is no tokenizer; the message names what is missing."""


def lay_out(tokenizer: Path, home: Path) -> dict[str, str]:
    """Make ``home`` a cache that holds the tokenizer of a model directory as :data:`NAME`.

    Returns:
        The environment under which nothing but this cache is asked.

    Raises:
        TokenizerError: the directory lacks a file.
    """
    entry = home / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = entry / "snapshots" / _REVISION
    snapshot.mkdir(parents=True)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(_REVISION)
    for name in _FILES:
        source = tokenizer.resolve() / name
        if not source.is_file():
            raise TokenizerError(f"{tokenizer}: there is no {name} in it; name the directory of a model")
        (snapshot / name).symlink_to(source)
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HOME": str(home)}
