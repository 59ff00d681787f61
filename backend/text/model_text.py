"""The text side that belongs to a model, wherever the model keeps it and of whatever family it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from backend.text.answer_rules import CallMarks
from backend.text.chat_template import BadTemplateError, ChatTemplate
from backend.text.gguf_tokenizer import BadVocabularyError, build_tokenizer, build_tokenizer_config
from backend.text.image_rules import BadImageRulesError, ImageRules
from backend.text.kimi.model_text import KimiModelText
from backend.text.kimi.tokenizer import VOCABULARY_FILE
from backend.text.media import ImageLimits, ReadsImages
from backend.text.prompt import Conversation, ModelText, Prompt
from backend.text.tokenizer import BadTokenizerError, Tokenizer


class ModelTextError(ValueError):
    """A model's tokenizer or chat template cannot be used; the message names the file."""


class TemplatedModelText:
    """Any model with a ``tokenizer.json`` and a Jinja template; its answers are plain text."""

    can_call_tools = False
    call_marks: CallMarks | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @property
    def token_bytes(self) -> Sequence[bytes]:
        return self._tokenizer.token_bytes

    @property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.special_tokens.values())

    def encode_text(self, text: str) -> list[int]:
        return self._tokenizer.encode_text(text)

    def encode(self, conversation: Conversation) -> Prompt:
        prompt = self._template.render(
            conversation.messages, tools=conversation.tools, options=conversation.options
        )
        salt = conversation.cache_salt
        return Prompt(self._tokenizer.encode_prompt(prompt.text, guard=prompt.guard, cache_salt=salt))


def load_model_text(
    path: Path,
    *,
    cache_chars: int,
    vocab_size: int,
    adds_default_system: bool = False,
    image_limits: ImageLimits | None = None,
) -> ModelText:
    """Read what a model's text side needs. Blocks for a fraction of a second.

    Args:
        path: a checkpoint directory with ``tokenizer.json`` and a chat template, or with ``tiktoken.model``
            (Kimi), or a GGUF file.
        cache_chars: how many characters of text the cache of encoded pieces may hold.
        vocab_size: ids that the model may sample.
        adds_default_system: see :class:`backend.text.kimi.template.KimiTemplate`.
        image_limits: of images in messages; None refuses them.

    Raises:
        ModelTextError: naming the file that is missing or wrong.
    """
    try:
        if path.suffix == ".gguf":
            return _from_gguf(path, cache_chars, vocab_size)
        if (path / VOCABULARY_FILE).exists():
            return KimiModelText.from_directory(
                path,
                cache_chars=cache_chars,
                vocab_size=vocab_size,
                adds_default_system=adds_default_system,
                images=None if image_limits is None else _image_reader(path, image_limits),
            )
        tokenizer = Tokenizer.from_directory(path, cache_chars=cache_chars, vocab_size=vocab_size)
        template = ChatTemplate.from_directory(path, list(tokenizer.special_tokens))
        return TemplatedModelText(tokenizer, template)
    except (BadTokenizerError, BadTemplateError, BadImageRulesError) as error:
        raise ModelTextError(str(error)) from error
    except BadVocabularyError as error:
        raise ModelTextError(f"{path}: {error}") from error


def _image_reader(directory: Path, limits: ImageLimits) -> ReadsImages:
    # Imported here because it brings image decoders, which a replica of a text model has no use for.
    from backend.text.images import ImageReader

    return ImageReader(ImageRules.from_directory(directory), limits)


def _from_gguf(path: Path, cache_chars: int, vocab_size: int) -> TemplatedModelText:
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
    template = ChatTemplate.from_config(config, list(tokenizer.special_tokens), str(path))
    return TemplatedModelText(tokenizer, template)
