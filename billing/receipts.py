"""Receipts: what one request was charged and why, signed, so that whoever paid can check it alone.

A receipt is the record, its priced lines and, for a prompt that was served in part from the prefix cache,
the chain of block hashes that its cached tokens stand for: the chain's root, the digest of its last block,
and how many blocks. With the request and the tokenizer anybody can derive the prompt's tokens and the same
digest, so the cached count is proved, not claimed. It is built from the ledger whenever it is asked for, and
every time the same.

The signature is Ed25519 over the receipt in canonical JSON (RFC 8785): keys sorted, no spaces, UTF-8, and no
number but integers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, select

from billing.block_chain import BLOCK_CHAIN, chain_head, root_digest
from billing.money import line_nanos
from billing.rates import CACHED_INPUT, INPUT, NO_CHARGE, OUTPUT, UNPRICED, rates_of_version
from billing.receipt_keys import SIGNATURE_ALGORITHM, SigningKey, is_signature_of
from billing.schema import ledger_transactions, usage_records
from billing.usage import UsageRecord

RECEIPT_VERSION = 1
_ROWS_PER_FETCH = 2_000

_WITHOUT_CARD = frozenset({NO_CHARGE.rate_card_version, UNPRICED.rate_card_version})


class ReceiptLine(msgspec.Struct, frozen=True, kw_only=True):
    """One token class: ``rate_micros`` micro-dollars per million tokens, ``amount_nanos`` nano-dollars."""

    token_class: str
    num_tokens: int
    rate_micros: int
    amount_nanos: int


class CacheProof(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks that the cached tokens came from: ``head`` follows from ``root`` and the prompt's tokens."""

    algorithm: str
    block_size: int
    num_blocks: int
    root: str
    head: str


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """See the module. Instants are UTC microseconds. ``cache`` is null where nothing was cached."""

    version: int
    request_id: str
    account_id: str
    token_id: str
    model: str
    requested_model: str
    surface: str
    replica_id: str
    session: str
    started_at_us: int
    finished_at_us: int
    status: str
    is_estimated: bool
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cache: CacheProof | None
    currency: str
    rate_card_version: str
    lines: list[ReceiptLine]
    free_nanos: int
    amount_nanos: int
    undiscounted_nanos: int
    neurons_e4: int


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """``value`` is base64url without padding; ``key_id`` names the public key."""

    algorithm: str
    key_id: str
    value: str


class SignedReceipt(msgspec.Struct, frozen=True, kw_only=True):
    receipt: Receipt
    signature: Signature


class BadReceiptError(ValueError):
    """A document that is no receipt; the message says why."""


def canonical(document: Any) -> bytes:
    """Canonical JSON of a document that holds no number but integers. Raises BadReceiptError."""
    if _holds_float(document):
        raise BadReceiptError("a receipt holds integers only")
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sign(receipt: Receipt, key: SigningKey) -> SignedReceipt:
    """The receipt with a signature; the same receipt and key give the same one."""
    value = key.sign(canonical(msgspec.to_builtins(receipt)))
    return SignedReceipt(
        receipt=receipt, signature=Signature(algorithm=SIGNATURE_ALGORITHM, key_id=key.id, value=value)
    )


def find_receipt(
    connection: Connection, account_id: str, request_id: str, *, cache_salt: str, currency: str
) -> Receipt | None:
    """The receipt of an account's request; None when the ledger has no such request of it.

    Args:
        cache_salt: what roots the account's block hashes. Only what follows from it is in the receipt.
    """
    row = connection.execute(
        _QUERY.where(usage_records.c.request_id == request_id, usage_records.c.account_id == account_id)
    ).one_or_none()
    return None if row is None else receipt_of(row, cache_salt=cache_salt, currency=currency)


_QUERY = select(usage_records, ledger_transactions).join(
    ledger_transactions, ledger_transactions.c.id == usage_records.c.request_id
)


def newest_receipts(connection: Connection, limit: int | None) -> Iterator[Row[Any]]:
    """Rows for :func:`receipt_of`, of the newest requests; read as they are used up."""
    query = _QUERY.order_by(usage_records.c.request_id.desc()).limit(limit)
    yield from connection.execution_options(yield_per=_ROWS_PER_FETCH).execute(query)


def receipt_of(row: Row[Any], *, cache_salt: str, currency: str) -> Receipt:
    """A record and its transaction as a receipt."""
    fields = row._mapping
    record = UsageRecord(**{name: fields[name] for name in UsageRecord.__struct_fields__})
    return Receipt(
        version=RECEIPT_VERSION,
        request_id=record.request_id,
        account_id=record.account_id,
        token_id=record.token_id,
        model=record.model,
        requested_model=record.requested_model,
        surface=record.surface,
        replica_id=record.replica_id,
        session=record.session,
        started_at_us=record.started_at_us,
        finished_at_us=record.finished_at_us,
        status=record.status,
        is_estimated=bool(record.is_estimated),
        prompt_tokens=record.prompt_tokens,
        cached_prompt_tokens=record.cached_prompt_tokens,
        completion_tokens=record.completion_tokens,
        reasoning_tokens=record.reasoning_tokens,
        cache=_cache_proof(record, cache_salt),
        currency=currency,
        rate_card_version=row.rate_card_version,
        lines=_lines(record, row),
        free_nanos=row.free_nanos,
        amount_nanos=row.amount_nanos,
        undiscounted_nanos=row.undiscounted_nanos,
        neurons_e4=row.neurons_e4,
    )


def problems_of(receipt: Receipt) -> list[str]:
    """What in a receipt contradicts itself: counts, lines, sums. Empty for a sound one."""
    problems: list[str] = []
    if receipt.version != RECEIPT_VERSION:
        problems.append(f"version {receipt.version} is not known here")
    if not 0 <= receipt.cached_prompt_tokens <= receipt.prompt_tokens:
        problems.append("more tokens are cached than the prompt has")
    cache = receipt.cache
    if cache is not None and cache.num_blocks * cache.block_size != receipt.cached_prompt_tokens:
        problems.append(
            f"{cache.num_blocks} blocks of {cache.block_size} tokens are not "
            f"{receipt.cached_prompt_tokens} cached tokens"
        )
    return problems + _price_problems(receipt)


def _price_problems(receipt: Receipt) -> list[str]:
    if not receipt.lines:
        is_free = receipt.amount_nanos == receipt.undiscounted_nanos == receipt.free_nanos == 0
        return [] if is_free else ["an amount without lines"]
    counts = {
        INPUT: receipt.prompt_tokens - receipt.cached_prompt_tokens,
        CACHED_INPUT: receipt.cached_prompt_tokens,
        OUTPUT: receipt.completion_tokens,
    }
    if [line.token_class for line in receipt.lines] != list(counts):
        return ["the lines are not input, cached input and output"]
    problems = []
    for line, rate in zip(receipt.lines, rates_of_version(receipt.rate_card_version), strict=True):
        if line.num_tokens != counts[line.token_class]:
            problems.append(f"{line.token_class}: {line.num_tokens} tokens, not {counts[line.token_class]}")
        if line.rate_micros != rate:
            problems.append(f"{line.token_class}: the rate is not that of the rate card")
        if line.amount_nanos != line_nanos(line.num_tokens, line.rate_micros):
            problems.append(f"{line.token_class}: the amount is not tokens times rate")
    fresh, cached, output = receipt.lines
    gross = fresh.amount_nanos + cached.amount_nanos + output.amount_nanos
    if receipt.amount_nanos != gross - receipt.free_nanos or not 0 <= receipt.free_nanos <= gross:
        problems.append("the amount is not the sum of the lines less what was free")
    saved = line_nanos(cached.num_tokens, fresh.rate_micros) - cached.amount_nanos
    if receipt.undiscounted_nanos != receipt.amount_nanos + saved:
        problems.append("the undiscounted amount does not follow from the lines")
    return problems


def verify(document: Any, public_keys: Mapping[str, bytes]) -> tuple[Receipt, list[str]]:
    """Check a signed receipt as it came, decoded from JSON; ``public_keys`` by id.

    An answer of the API will do as well: its ``result`` is looked at.

    Returns:
        The receipt, and what is wrong with it: nothing, for one that was signed so and adds up.

    Raises:
        BadReceiptError: it is no receipt at all.
    """
    if isinstance(document, dict) and "receipt" not in document and isinstance(document.get("result"), dict):
        document = document["result"]
    try:
        signed = msgspec.convert(document, SignedReceipt)
    except msgspec.ValidationError as error:
        raise BadReceiptError(f"this is no signed receipt: {error}") from None
    signature = signed.signature
    public_key = public_keys.get(signature.key_id)
    problems = []
    if signature.algorithm != SIGNATURE_ALGORITHM:
        problems.append(f"the signature's algorithm is {signature.algorithm!r}, not {SIGNATURE_ALGORITHM}")
    elif public_key is None:
        problems.append(f"the key {signature.key_id} is not known")
    elif not is_signature_of(canonical(document["receipt"]), signature.value, public_key):
        problems.append("the signature does not belong to this receipt")
    return signed.receipt, problems + problems_of(signed.receipt)


def prompt_problems(
    receipt: Receipt, token_ids: Sequence[int], block_extras: Mapping[int, bytes] | None = None
) -> list[str]:
    """What a receipt says that the prompt's tokens do not bear out.

    Args:
        token_ids: of the prompt, derived from the request by the model's own template and tokenizer.
        block_extras: what is hashed with a block beside its tokens, by block: the images that it shows.
    """
    if len(token_ids) != receipt.prompt_tokens:
        return [f"the request makes {len(token_ids)} prompt tokens, the receipt says {receipt.prompt_tokens}"]
    cache = receipt.cache
    if cache is None:
        return []
    if cache.algorithm != BLOCK_CHAIN:
        return [f"the block chain {cache.algorithm!r} is not known here"]
    head = chain_head(
        bytes.fromhex(cache.root), token_ids, cache.block_size, cache.num_blocks, block_extras or {}
    )
    if head.hex() != cache.head:
        return ["the cached blocks are not those of this request's prompt"]
    return []


def _lines(record: UsageRecord, row: Row[Any]) -> list[ReceiptLine]:
    if row.rate_card_version in _WITHOUT_CARD:
        return []
    counts = (
        (INPUT, record.prompt_tokens - record.cached_prompt_tokens, row.input_nanos),
        (CACHED_INPUT, record.cached_prompt_tokens, row.cached_input_nanos),
        (OUTPUT, record.completion_tokens, row.output_nanos),
    )
    return [
        ReceiptLine(
            token_class=token_class, num_tokens=num_tokens, rate_micros=rate, amount_nanos=amount_nanos
        )
        for (token_class, num_tokens, amount_nanos), rate in zip(
            counts, rates_of_version(row.rate_card_version), strict=True
        )
    ]


def _cache_proof(record: UsageRecord, cache_salt: str) -> CacheProof | None:
    if not record.num_cached_blocks:
        return None
    return CacheProof(
        algorithm=BLOCK_CHAIN,
        block_size=record.cached_prompt_tokens // record.num_cached_blocks,
        num_blocks=record.num_cached_blocks,
        root=root_digest(cache_salt.encode()).hex(),
        head=record.cache_head,
    )


def _holds_float(document: Any) -> bool:
    if isinstance(document, dict):
        return any(_holds_float(value) for value in document.values())
    if isinstance(document, list):
        return any(_holds_float(value) for value in document)
    return isinstance(document, float)
