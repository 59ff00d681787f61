"""Kimi's tokenizer, template and parser as one text side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from backend.text.answer_rules import CallMarks
from backend.text.kimi.call_ids import next_index
from backend.text.kimi.history import MediaPart
from backend.text.kimi.marks import Mark, Marks
from backend.text.kimi.parser import KimiOutputForm
from backend.text.kimi.template import KimiTemplate
from backend.text.kimi.thinking import read_thinking
from backend.text.kimi.tokenizer import TiktokenTokenizer
from backend.text.media import ImagePatches, ReadsImages, expand_placeholders
from backend.text.messages import BadMessageError
from backend.text.prompt import Conversation, Prompt
from backend.text.tokenizer import BadTokenizerError
from backend.text.tool_calls import DeclaredTools

_MEDIA_PAD: Final = "<|media_pad|>"
_STOPS: Final = ("<|im_end|>", "[EOS]")
# Every special token that the template writes.
_REQUIRED: Final = (
    *_STOPS,
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_content|>",
    _MEDIA_PAD,
    "<|media_end|>",
    *(mark.value for mark in Mark if not mark.name.startswith("ODD_")),
)


class KimiModelText:
    """The text side of Kimi K2.5; see :class:`backend.text.prompt.ModelText`.

    Args:
        images: reads the images of messages; None for a model that takes text only.

    Raises:
        BadTokenizerError: when the vocabulary lacks one of the model's special tokens.
    """

    can_call_tools = True

    def __init__(
        self, tokenizer: TiktokenTokenizer, template: KimiTemplate, images: ReadsImages | None = None
    ) -> None:
        missing = [spelling for spelling in _REQUIRED if spelling not in tokenizer.special_tokens]
        if missing:
            raise BadTokenizerError(f"tokenizer_config.json: added_tokens_decoder: {missing[0]} is missing")
        self.tokenizer = tokenizer
        self.template = template
        self._images = images
        self._marks = Marks(tokenizer.special_tokens)
        special = tokenizer.special_tokens
        self._reasoning_end = special[Mark.THINK_END.value]
        self.call_marks = CallMarks(
            section_begin=special[Mark.SECTION_BEGIN.value],
            section_end=special[Mark.SECTION_END.value],
            call_begin=special[Mark.CALL_BEGIN.value],
            arguments_begin=special[Mark.ARGUMENTS_BEGIN.value],
            call_end=special[Mark.CALL_END.value],
        )

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        *,
        cache_chars: int,
        vocab_size: int,
        adds_default_system: bool = False,
        images: ReadsImages | None = None,
    ) -> KimiModelText:
        """Read a checkpoint directory.

        Raises:
            BadTokenizerError: naming the file that is missing or cannot be used.
        """
        tokenizer = TiktokenTokenizer.from_directory(
            directory, cache_chars=cache_chars, vocab_size=vocab_size
        )
        try:
            return cls(tokenizer, KimiTemplate(adds_default_system=adds_default_system), images)
        except BadTokenizerError as error:
            raise BadTokenizerError(f"{directory}: {error}") from error

    @property
    def token_bytes(self) -> Sequence[bytes]:
        return self.tokenizer.token_bytes

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.special_tokens[spelling] for spelling in _STOPS)

    @property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.special_tokens.values())

    def encode_text(self, text: str) -> list[int]:
        return self.tokenizer.encode_text(text)

    def encode(self, conversation: Conversation) -> Prompt:
        thinking = read_thinking(conversation.options, conversation.thinking)
        pieces = self.template.render(conversation.messages, tools=conversation.tools, thinking=thinking)
        images = self._read_images(pieces.media)
        token_ids = self.tokenizer.encode_pieces(
            pieces.texts, pieces.specials, cache_salt=conversation.cache_salt
        )
        media_pad = self.tokenizer.special_tokens[_MEDIA_PAD]
        token_ids, spans = expand_placeholders(token_ids, media_pad, images)
        form = KimiOutputForm(
            marks=self._marks,
            tools=DeclaredTools(conversation.tools),
            first_call_index=next_index(conversation.messages),
            is_thinking=thinking.is_on,
            max_calls=None if conversation.allows_parallel_calls else 1,
        )
        return Prompt(token_ids, form, self._reasoning_end if thinking.is_on else None, media=spans)

    def _read_images(self, media: Sequence[MediaPart]) -> list[ImagePatches]:
        images: list[ImagePatches] = []
        num_tokens = 0
        for item in media:
            if self._images is None:
                # A placeholder alone would be an image that the model silently cannot see.
                kind = "images" if item.kind == "image" else "video"
                raise BadMessageError(item.path, f"this model takes text only, no {kind}")
            if item.kind != "image":
                raise BadMessageError(item.path, "this model takes text and images, no video")
            image = self._images.read(item.part, item.path)
            num_tokens += image.num_tokens
            if num_tokens > self._images.limits.max_tokens:
                most = self._images.limits.max_tokens
                raise BadMessageError(item.path, f"the images of a request may be {most} tokens at most")
            images.append(image)
        return images
