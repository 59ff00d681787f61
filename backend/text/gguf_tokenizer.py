"""A ``tokenizers.Tokenizer`` out of a GGUF file's metadata.

GGUF keeps a byte-level BPE vocabulary as three arrays (tokens, token types, merges) and names its
pre-tokenizer by a word. This module turns that into the ordinary ``tokenizer.json`` form, so that the rest of
the house knows one kind of tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

_CONTROL: Final = 3
_USER_DEFINED: Final = 4

# What every pre-tokenizer of this family shares: words with one leading space, punctuation runs, white space.
_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT: Final = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


class BadVocabularyError(ValueError):
    """A GGUF file's tokenizer metadata cannot be used; the message names the key."""


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Args:
        fields: the file's metadata as plain Python values
            (``{name: field.contents() for name, field in reader.fields.items()}``).

    Returns:
        A tokenizer without a post-processor (nothing is ever added to a text); its ``save()`` writes
        ``tokenizer.json``.

    Raises:
        BadVocabularyError: when a key is missing, or names a kind of tokenizer that is not supported.
    """
    kind = _take(fields, "tokenizer.ggml.model")
    if kind != "gpt2":
        raise BadVocabularyError(
            f"tokenizer.ggml.model: {kind!r} is not supported, only 'gpt2' (byte-level BPE)"
        )
    tokens: Sequence[str] = _take(fields, "tokenizer.ggml.tokens")
    token_types: Sequence[int] = _take(fields, "tokenizer.ggml.token_type")
    if len(tokens) != len(token_types):
        raise BadVocabularyError(
            f"tokenizer.ggml.token_type: {len(token_types)} entries for {len(tokens)} tokens"
        )
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=[_split_merge(merge) for merge in _take(fields, "tokenizer.ggml.merges")],
        )
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(str(fields.get("tokenizer.ggml.pre", "gpt-2")))
    tokenizer.decoder = decoders.ByteLevel()
    # A control token is recognised in template text and left out of decoded text; a user-defined one is only
    # recognised. Both keep their ids: the spelling is already in the vocabulary.
    for token, token_type in zip(tokens, token_types, strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            is_special = token_type == _CONTROL
            tokenizer.add_tokens([AddedToken(token, special=is_special, normalized=False)])
    return tokenizer


def build_tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The ``tokenizer_config.json`` beside :func:`build_tokenizer`'s: chat template, special spellings.

    Raises:
        BadVocabularyError: when a special token's id lies outside the vocabulary.
    """
    tokens: Sequence[str] = _take(fields, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {"add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False))}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = fields.get(key)
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise BadVocabularyError(f"{key}: {token_id} lies outside the vocabulary of {len(tokens)}")
        config[f"{role}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config


def _take(fields: Mapping[str, Any], key: str) -> Any:
    try:
        return fields[key]
    except KeyError:
        raise BadVocabularyError(f"{key}: missing") from None


def _split_merge(merge: str) -> tuple[str, str]:
    # Byte-level spellings hold no space, so the one space separates the two halves.
    left, separator, right = merge.partition(" ")
    if not separator:
        raise BadVocabularyError(f"tokenizer.ggml.merges: {merge!r} is not two tokens")
    return left, right


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    build = _PRE_TOKENIZERS.get(name)
    if build is None:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise BadVocabularyError(f"tokenizer.ggml.pre: {name!r} is not supported; known are {known}")
    return build()


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: Final[Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]]] = {
    "gpt-2": _gpt2,
    "default": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _split(_LLAMA3_SPLIT),
    "qwen2": lambda: _split(_QWEN2_SPLIT),
}
