"""The tokenizer of a checkpoint that keeps its vocabulary as a tiktoken file.

``tiktoken.model`` holds the ordinary tokens, ``tokenizer_config.json`` names some of the 256 special slots
behind them. A slot's id is its place: slots without a name are kept, never closed up, because the model's
embedding rows are numbered like that.

Special tokens are known by name only to :meth:`TiktokenTokenizer.encode_pieces`, which is told where they
are; text is always encoded as ordinary tokens.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tiktoken

from backend.text.piece_cache import PieceCache
from backend.text.tokenizer import BadTokenizerError

VOCABULARY_FILE: Final = "tiktoken.model"
_CONFIG_FILE: Final = "tokenizer_config.json"
_NUM_SPECIAL_SLOTS: Final = 256

# What the vocabulary was made with: Chinese runs; words with their leading mark, in two shapes of upper and
# lower case; numbers of up to three digits; punctuation; line ends; white space.
_LETTERS: Final = r"[^\r\n\p{L}\p{N}]?"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN: Final = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LETTERS}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LETTERS}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# The published tokenizer cuts a text after so many characters, and a run of (or without) white space too, so
# that no piece takes the encoder long. Where it cuts decides which tokens come out.
_MAX_CHARS: Final = 400_000
_MAX_RUN_CHARS: Final = 25_000
_RUN: Final = re.compile(r"\s++|\S++")


class TiktokenTokenizer:
    """Encodes prompts and knows the bytes of every token. Safe to use from several threads.

    Args:
        ranks: bytes of the ordinary tokens -> id, ids from 0 without a gap.
        added: id -> entry of ``added_tokens_decoder``.
        cache_chars: how many characters of text the cache of encoded pieces may hold.
        vocab_size: ids that the model may sample, when more than the tokenizer has.

    Attributes:
        special_tokens: spelling -> id of every special slot, unnamed ones included.
        token_bytes: bytes that each id adds to a text, indexed by id; empty for control tokens.
        encoding: the ordinary tokens alone.

    Raises:
        BadTokenizerError: when ids do not fit together.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        added: Mapping[int, Mapping[str, Any]],
        *,
        cache_chars: int,
        vocab_size: int = 0,
    ) -> None:
        num_ordinary = len(ranks)
        if sorted(ranks.values()) != list(range(num_ordinary)):
            raise BadTokenizerError(f"{VOCABULARY_FILE}: ids must be 0 to {num_ordinary - 1}, each once")
        slots = range(num_ordinary, num_ordinary + _NUM_SPECIAL_SLOTS)
        for token_id in added:
            if token_id not in slots:
                raise BadTokenizerError(
                    f"{_CONFIG_FILE}: added_tokens_decoder.{token_id}: is no special slot, "
                    f"which are {slots.start} to {slots.stop - 1}"
                )
        self.special_tokens: dict[str, int] = {}
        self.token_bytes = [b""] * max(vocab_size, slots.stop)
        for token, rank in ranks.items():
            self.token_bytes[rank] = token
        for token_id in slots:
            entry = added.get(token_id, {"content": f"<|reserved_token_{token_id}|>", "special": True})
            self.special_tokens[entry["content"]] = token_id
            if not entry.get("special"):  # shown in texts, such as the marks around reasoning
                self.token_bytes[token_id] = entry["content"].encode()
        if len(self.special_tokens) != _NUM_SPECIAL_SLOTS:
            raise BadTokenizerError(f"{_CONFIG_FILE}: added_tokens_decoder: two tokens have the same content")
        self.encoding = tiktoken.Encoding(
            VOCABULARY_FILE, pat_str=_PATTERN, mergeable_ranks=dict(ranks), special_tokens={}
        )
        self._cache = PieceCache(cache_chars)

    @classmethod
    def from_directory(cls, directory: Path, *, cache_chars: int, vocab_size: int = 0) -> TiktokenTokenizer:
        """Read both files of a checkpoint directory.

        Raises:
            BadTokenizerError: naming the file that is missing or cannot be used.
        """
        try:
            return cls(
                read_ranks(directory / VOCABULARY_FILE),
                _read_added(directory / _CONFIG_FILE),
                cache_chars=cache_chars,
                vocab_size=vocab_size,
            )
        except BadTokenizerError as error:
            raise BadTokenizerError(f"{directory}: {error}") from error

    def encode_text(self, text: str) -> list[int]:
        """Encode text as ordinary tokens: a special token's spelling in it is so many characters."""
        return self.encode_pieces([text], [])

    def encode_pieces(
        self, texts: Sequence[str], specials: Sequence[str], *, cache_salt: str = ""
    ) -> list[int]:
        """Encode plain texts with special tokens between them.

        Args:
            texts: one more than ``specials``; what they spell never becomes a special token.
            specials: spellings of special tokens.
            cache_salt: scope of the piece cache, so that no account can time what another one sent.

        Raises:
            KeyError: when the vocabulary has no such special token.
        """
        special_ids = [self.special_tokens[special] for special in specials]
        cut_texts = _cut(texts, specials)
        flat = list(itertools.chain.from_iterable(cut_texts))
        encoded = iter(self._cache.encode(flat, self._encode, cache_salt))
        token_ids: list[int] = []
        for position, parts in enumerate(cut_texts):
            if position:
                token_ids.append(special_ids[position - 1])
            for _ in parts:
                token_ids.extend(next(encoded))
        return token_ids

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encoding.encode_ordinary(text) for text in texts]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a tiktoken file: a token in base64 and its id on each line.

    Raises:
        BadTokenizerError: when it is missing or of another form.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadTokenizerError(f"{path.name}: {error.strerror}") from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise BadTokenizerError(f"{path.name}: line {number} is not a token and its id") from error
    return ranks


def _read_added(path: Path) -> dict[int, Mapping[str, Any]]:
    try:
        added = json.loads(path.read_bytes())["added_tokens_decoder"]
        entries = {int(token_id): entry for token_id, entry in added.items()}
        if not all(isinstance(entry["content"], str) for entry in entries.values()):
            raise BadTokenizerError(f"{path.name}: added_tokens_decoder: every token needs its content")
    except OSError as error:
        raise BadTokenizerError(f"{path.name}: {error.strerror}") from error
    except KeyError as error:
        raise BadTokenizerError(f"{path.name}: {error.args[0]} is missing") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise BadTokenizerError(f"{path.name}: added_tokens_decoder: not as expected: {error}") from error
    return entries


def _cut(texts: Sequence[str], specials: Sequence[str]) -> list[list[str]]:
    """Cut the texts of a prompt where the published tokenizer cuts the whole of it."""
    num_chars = sum(map(len, texts)) + sum(map(len, specials))
    if num_chars <= _MAX_RUN_CHARS:
        return [[text] for text in texts]
    whole = texts[0] + "".join(special + text for special, text in zip(specials, texts[1:], strict=True))
    places = cut_places(whole)
    cut_texts: list[list[str]] = []
    start = 0
    for text, special in itertools.zip_longest(texts, specials, fillvalue=""):
        inside = [place - start for place in places if start < place < start + len(text)] if places else []
        edges = [0, *inside, len(text)]
        cut_texts.append([text[begin:end] for begin, end in itertools.pairwise(edges)])
        start += len(text) + len(special)
    return cut_texts


def cut_places(text: str, max_chars: int = _MAX_CHARS, max_run: int = _MAX_RUN_CHARS) -> list[int]:
    """Where a long text is cut: every ``max_chars``, and within them wherever a run becomes too long."""
    places: list[int] = []
    for start in range(0, len(text), max_chars):
        end = min(start + max_chars, len(text))
        if start:
            places.append(start)
        run_end = start
        # A run that is too long lies across one of these; the others need no look.
        for probe in range(start + max_run, end, max_run):
            if probe < run_end:
                continue
            is_space = text[probe].isspace()
            run_start = probe
            while run_start > start and text[run_start - 1].isspace() == is_space:
                run_start -= 1
            run = _RUN.match(text, probe, end)
            run_end = run.end() if run else probe
            places += range(run_start + max_run, run_end, max_run)
    return places
