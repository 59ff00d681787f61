"""Text to token ids and back, for one checkpoint's ``tokenizer.json``.

Special tokens exist only where the chat template wrote them. The vocabulary is therefore split in two: a
plain tokenizer that has never heard of special tokens and turns any text into ordinary ones, and a table of
special spellings that is applied to rendered prompts and to nothing else (see
:mod:`backend.text.chat_template`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from backend.text.piece_cache import PieceCache


class BadTokenizerError(ValueError):
    """A checkpoint's tokenizer cannot be used; the message names the file and the key."""


class Tokenizer:
    """Encodes prompts and knows the bytes of every token. Safe to use from several threads.

    Attributes:
        special_tokens: spelling -> id of every added token, which template text may use.
        token_bytes: bytes that each id adds to a text, indexed by id; empty for control tokens.
        special_pattern: matches any special spelling, the longest first.
    """

    def __init__(self, definition: Mapping[str, Any], *, cache_chars: int, vocab_size: int = 0) -> None:
        """
        Args:
            definition: the content of ``tokenizer.json``.
            cache_chars: how many characters of text the cache of encoded pieces may hold.
            vocab_size: ids that the model may sample, when more than the tokenizer names.

        Raises:
            BadTokenizerError: when the definition is not of a supported kind.
        """
        every: list[dict[str, Any]] = list(definition.get("added_tokens") or [])
        added = [token for token in every if not _is_plain(token)]
        self.special_tokens: dict[str, int] = {token["content"]: token["id"] for token in added}
        self.special_pattern = _special_pattern(added)
        plain = [token for token in every if _is_plain(token)]
        self._plain = _plain_tokenizer(definition, self.special_tokens, plain)
        self.token_bytes = _token_bytes(definition, every, vocab_size)
        self._cache = PieceCache(cache_chars)

    @classmethod
    def from_directory(cls, directory: Path, *, cache_chars: int, vocab_size: int = 0) -> Tokenizer:
        """Read ``tokenizer.json`` of a checkpoint directory.

        Raises:
            BadTokenizerError: when the file is missing or cannot be used.
        """
        path = directory / "tokenizer.json"
        try:
            definition = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise BadTokenizerError(f"{path}: missing; a checkpoint needs its tokenizer beside it") from None
        except ValueError as error:
            raise BadTokenizerError(f"{path}: not JSON: {error}") from error
        try:
            return cls(definition, cache_chars=cache_chars, vocab_size=vocab_size)
        except BadTokenizerError as error:
            raise BadTokenizerError(f"{path}: {error}") from error

    def encode_text(self, text: str) -> list[int]:
        """Encode text as ordinary tokens: a special token's spelling in it is so many characters."""
        return self._encode([text])[0] if text else []

    def encode_prompt(self, rendered: str, *, guard: str = "", cache_salt: str = "") -> list[int]:
        """Encode a rendered prompt: special spellings become special tokens, unless guarded.

        Args:
            rendered: the chat template's output.
            guard: the character that breaks spellings in text of users; taken out of the text here.
            cache_salt: scope of the piece cache, so that no account can time what another one sent.
        """
        pieces: list[str] = []
        specials: list[int] = []
        end = 0
        for match in self.special_pattern.finditer(rendered):
            pieces.append(rendered[end : match.start()])
            specials.append(self.special_tokens[match.group(1)])
            end = match.end()
        pieces.append(rendered[end:])
        if guard:
            pieces = [piece.replace(guard, "") for piece in pieces]
        encoded = self._cache.encode(pieces, self._encode, cache_salt)
        token_ids = list(encoded[0])
        for special, following in zip(specials, encoded[1:], strict=True):
            token_ids.append(special)
            token_ids.extend(following)
        return token_ids

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        # The batch call, unlike the single one, releases the interpreter lock: a long prompt encoded in a
        # thread does not hold up the event loop.
        return [encoding.ids for encoding in self._plain.encode_batch_fast(texts, add_special_tokens=False)]


def _is_plain(token: Mapping[str, Any]) -> bool:
    """Whether an added token is ordinary vocabulary: some models have their runs of white space there."""
    return not token.get("special") and token["content"].isspace()


def _special_pattern(added: Sequence[Mapping[str, Any]]) -> re.Pattern[str]:
    if not added:
        return re.compile(r"(?!)()")
    by_length = sorted(added, key=lambda token: len(token["content"]), reverse=True)
    # Group 1 is the spelling; white space that a token swallows stays outside the group.
    left = [re.escape(token["content"]) for token in by_length if token.get("lstrip")]
    right = [re.escape(token["content"]) for token in by_length if token.get("rstrip")]
    pattern = "(" + "|".join(re.escape(token["content"]) for token in by_length) + ")"
    if left:
        pattern = rf"(?:\s+(?={'|'.join(left)}))?{pattern}"
    if right:
        pattern = rf"{pattern}(?:(?:{'|'.join(f'(?<={spelling})' for spelling in right)})\s+)?"
    return re.compile(pattern)


def _plain_tokenizer(
    definition: Mapping[str, Any], special_tokens: Mapping[str, int], plain: Sequence[Mapping[str, Any]]
) -> tokenizers.Tokenizer:
    """The same tokenizer without special tokens: no spelling of one can come out of it."""
    model = dict(definition["model"])
    vocabulary = {
        token: token_id for token, token_id in model["vocab"].items() if token not in special_tokens
    }
    # Added tokens that the vocabulary lacks would be numbered anew, behind it.
    vocabulary.update({token["content"]: token["id"] for token in plain})
    model["vocab"] = vocabulary
    bare = {**definition, "model": model, "added_tokens": list(plain), "post_processor": None}
    try:
        # The library raises bare Exception for a definition it cannot read.
        return tokenizers.Tokenizer.from_str(json.dumps(bare))
    except Exception as error:
        raise BadTokenizerError(str(error)) from error


def _token_bytes(
    definition: Mapping[str, Any], added: Sequence[Mapping[str, Any]], vocab_size: int
) -> list[bytes]:
    decoder = (definition.get("decoder") or {}).get("type")
    if decoder != "ByteLevel":
        raise BadTokenizerError(f"decoder: {decoder!r} is not supported, only byte-level vocabularies")
    vocabulary: Mapping[str, int] = definition["model"]["vocab"]
    highest = max([*vocabulary.values(), *(token["id"] for token in added)], default=-1)
    table = [b""] * max(vocab_size, highest + 1)
    byte_of = _byte_of_character()
    for token, token_id in vocabulary.items():
        try:
            table[token_id] = bytes([byte_of[character] for character in token])
        except KeyError:
            table[token_id] = token.encode()
    for entry in added:
        table[entry["id"]] = b"" if entry.get("special") else entry["content"].encode()
    return table


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, other bytes for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + position): byte for position, byte in enumerate(others)})
    return table
