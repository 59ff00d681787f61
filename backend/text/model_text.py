"""The tokenizer and the chat template that belong to a model, wherever the model keeps them."""

from __future__ import annotations

import json
from pathlib import Path

from backend.text.chat_template import BadTemplateError, ChatTemplate
from backend.text.gguf_tokenizer import BadVocabularyError, build_tokenizer, build_tokenizer_config
from backend.text.tokenizer import BadTokenizerError, Tokenizer


class ModelTextError(ValueError):
    """A model's tokenizer or chat template cannot be used; the message names the file."""


def load_model_text(path: Path, *, cache_chars: int, vocab_size: int) -> tuple[Tokenizer, ChatTemplate]:
    """Read what a model's text side needs. Blocks for a fraction of a second.

    Args:
        path: a checkpoint directory with ``tokenizer.json`` and a chat template, or a GGUF file.
        cache_chars: see :class:`Tokenizer`.
        vocab_size: ids that the model may sample.

    Raises:
        ModelTextError: naming the file that is missing or wrong.
    """
    try:
        if path.suffix == ".gguf":
            return _from_gguf(path, cache_chars, vocab_size)
        tokenizer = Tokenizer.from_directory(path, cache_chars=cache_chars, vocab_size=vocab_size)
        return tokenizer, ChatTemplate.from_directory(path, list(tokenizer.special_tokens))
    except (BadTokenizerError, BadTemplateError) as error:
        raise ModelTextError(str(error)) from error
    except BadVocabularyError as error:
        raise ModelTextError(f"{path}: {error}") from error


def _from_gguf(path: Path, cache_chars: int, vocab_size: int) -> tuple[Tokenizer, ChatTemplate]:
    # Imported here because it brings numpy, which a replica of a checkpoint directory has no use for.
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(path))
    except (OSError, ValueError) as error:
        raise ModelTextError(f"{path}: not a readable GGUF file: {error}") from error
    fields = {
        name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")
    }
    definition = json.loads(build_tokenizer(fields).to_str())
    tokenizer = Tokenizer(definition, cache_chars=cache_chars, vocab_size=vocab_size)
    config = build_tokenizer_config(fields)
    return tokenizer, ChatTemplate.from_config(config, list(tokenizer.special_tokens), str(path))
