"""Checks a receipt with nothing but the public key, the tokenizer and the request that was sent.

    python verify_receipt.py receipt.json jwks.json [request.json TOKENIZER_DIRECTORY]

``receipt.json`` is what ``GET /client/v4/accounts/{account}/ai/usage/{request_id}`` answered, ``jwks.json``
what ``GET /.well-known/jwks.json`` did. ``request.json`` is the body of the chat request; the directory holds
the model's ``tokenizer.json`` and ``tokenizer_config.json``.

This program shares no code with the service: it is what a customer would write, and may copy. It needs
``pip install cryptography tokenizers jinja2``. It reads conversations of plain text whose messages hold none
of the model's control tokens (the service takes those for text, a tokenizer alone does not).
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


def check(condition: bool, what: str) -> None:
    """Give up unless ``condition``."""
    if not condition:
        sys.exit(f"WRONG: {what}")
    print(f"ok: {what}")


def from_base64url(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def check_signature(document: dict[str, Any], key_set: dict[str, Any]) -> None:
    """Ed25519 over the receipt with sorted keys and no spaces."""
    signature = document["signature"]
    message = json.dumps(
        document["receipt"], sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode()
    known = {key["kid"]: key for key in key_set["keys"] if key["crv"] == "Ed25519"}
    check(signature["key_id"] in known, f"the key {signature['key_id']} is known")
    public_key = Ed25519PublicKey.from_public_bytes(from_base64url(known[signature["key_id"]]["x"]))
    try:
        public_key.verify(from_base64url(signature["value"]), message)
        is_signed = True
    except InvalidSignature:
        is_signed = False
    check(is_signed, "the signature belongs to the receipt")


def check_price(receipt: dict[str, Any]) -> None:
    """Each line is tokens times rate, rounded once, half to even; the amount is their sum."""
    counts = [
        receipt["prompt_tokens"] - receipt["cached_prompt_tokens"],
        receipt["cached_prompt_tokens"],
        receipt["completion_tokens"],
    ]
    lines = receipt["lines"]
    for line, num_tokens in zip(lines, counts, strict=bool(lines)):
        amount = round(Fraction(num_tokens * line["rate_micros"], 1_000))
        check(
            (line["num_tokens"], line["amount_nanos"]) == (num_tokens, amount),
            f"{line['num_tokens']} tokens of {line['token_class']} cost {amount} nano-dollars",
        )
    total = sum(line["amount_nanos"] for line in lines) - receipt["free_nanos"]
    check(receipt["amount_nanos"] == total, f"the request cost {total} nano-dollars")


def prompt_tokens(request: dict[str, Any], directory: Path) -> list[int]:
    """The tokens of the rendered conversation."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer

    config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        config["chat_template"]
    )
    text = template.render(messages=request["messages"], add_generation_prompt=True)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def chain_head(cache: dict[str, Any], token_ids: list[int]) -> str:
    """BLAKE2b over each block of tokens, chained to the digest before it."""
    head = bytes.fromhex(cache["root"])
    size = cache["block_size"]
    for start in range(0, cache["num_blocks"] * size, size):
        ids = token_ids[start : start + size]
        block = b"embergate.kv.1.block" + head + struct.pack("<I", len(ids))
        block += struct.pack(f"<{len(ids)}i", *ids) + struct.pack("<I", 0)
        head = hashlib.blake2b(block, digest_size=32).digest()
    return head.hex()


def check_prompt(receipt: dict[str, Any], token_ids: list[int]) -> None:
    """The prompt has as many tokens as were billed, and its first blocks are those that were cached."""
    check(len(token_ids) == receipt["prompt_tokens"], f"the prompt has {len(token_ids)} tokens")
    cache = receipt["cache"]
    if cache is None:
        check(receipt["cached_prompt_tokens"] == 0, "none of them were cached")
        return
    num_cached = cache["num_blocks"] * cache["block_size"]
    check(receipt["cached_prompt_tokens"] == num_cached, f"{num_cached} cached tokens are whole blocks")
    check(cache["head"] == chain_head(cache, token_ids), "the cached blocks are those of this prompt")


def main(arguments: list[str]) -> None:
    if len(arguments) not in (2, 4):
        sys.exit(__doc__)
    document = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    document = document.get("result", document)
    check_signature(document, json.loads(Path(arguments[1]).read_text(encoding="utf-8")))
    check_price(document["receipt"])
    if len(arguments) == 4:
        request = json.loads(Path(arguments[2]).read_text(encoding="utf-8"))
        check_prompt(document["receipt"], prompt_tokens(request, Path(arguments[3])))


if __name__ == "__main__":
    main(sys.argv[1:])
