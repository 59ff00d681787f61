"""Prepares Kimi K2.5 in small: a random checkpoint in the published form, for tests and development.

Its vocabulary derives from the embedded model's, in the form of Kimi's: nothing of Kimi's own is needed.
"""

from __future__ import annotations

from pathlib import Path

from backend.model.errors import ModelLoadError
from backend.text.kimi.tokenizer import read_ranks
from backend.text.kimi.vocabulary import rank_tokens
from backend.text.tokenizer import BadTokenizerError, Tokenizer
from embergate.config import TinyForm
from embergate.embedded_model import prepare
from embergate.layout import DataLayout
from embergate.refusal import Refusal
from embergate.voice import Voice

_NUM_ORDINARY_TOKENS = 16_128
"""With the 256 special slots, a vocabulary of 16,384: small, and text is not yet spelled letter by letter."""

_STAMP = "made-by"
_STAMP_TEXT = "embergate tiny checkpoint, format 1\n"


def prepare_tiny(layout: DataLayout, form: TinyForm, voice: Voice) -> Path:
    """Make sure that the tiny model lies ready in ``form``, and return its checkpoint directory.

    Raises:
        Refusal: when it cannot be written, or the embedded model cannot be prepared for its vocabulary.
    """
    checkpoint = layout.tiny_checkpoint(form)
    stamp = checkpoint / _STAMP
    if not stamp.is_file() or stamp.read_text() != _STAMP_TEXT:
        write_tiny(checkpoint, form, 0, derive_ranks(layout, voice), voice)
        stamp.write_text(_STAMP_TEXT)
    return checkpoint


def write_tiny(directory: Path, form: TinyForm, seed: int, ranks: dict[bytes, int], voice: Voice) -> None:
    """Write a tiny checkpoint.

    Raises:
        Refusal: when it cannot be written.
    """
    from backend.model.tiny_checkpoint import write_tiny_checkpoint  # torch: only when something is written

    try:
        write_tiny_checkpoint(directory, form, ranks, seed=seed, progress=voice.progress)
    except ModelLoadError as error:
        raise Refusal(f"the tiny model cannot be written: {error}.") from error
    except OSError as error:
        raise Refusal(f"the tiny model cannot be written to {directory}: {error.strerror}.") from error


def derive_ranks(layout: DataLayout, voice: Voice) -> dict[bytes, int]:
    """The embedded model's most common tokens as ranks; the embedded model is prepared when needed.

    Raises:
        Refusal: when it cannot be.
    """
    checkpoint = prepare(layout, "kimi", voice.progress, voice.say)
    tokenizer = Tokenizer.from_directory(checkpoint, cache_chars=0)
    special = set(tokenizer.special_tokens.values())
    ordinary = (token for token_id, token in enumerate(tokenizer.token_bytes) if token_id not in special)
    return rank_tokens(ordinary, _NUM_ORDINARY_TOKENS)


def read_tiktoken(path: Path) -> dict[bytes, int]:
    """The ranks of a tiktoken file.

    Raises:
        Refusal: when it is not one.
    """
    try:
        return read_ranks(path)
    except BadTokenizerError as error:
        raise Refusal(f"{path.parent}: {error}.") from error
