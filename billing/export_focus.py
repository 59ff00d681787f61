"""Charges in the columns of FOCUS 1.2, as CSV or Parquet, written as they are read.

Billed and effective costs are what the ledger charged, with all nine decimals. List and contracted costs are
unit price times quantity, exactly, which takes twelve: they do not know that each request was rounded to a
nano-dollar. Cached input has the price of input
as its list price and its own as the contracted one: the discount is visible in every row.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from itertools import islice
from typing import IO, TYPE_CHECKING, Any

from billing.export import FREE, ExportedCharge
from billing.periods import month_period, month_text
from billing.rates import CACHED_INPUT, INPUT, OUTPUT

if TYPE_CHECKING:
    import pyarrow

FOCUS_VERSION = "1.2"
PROVIDER = "Embergate"
SERVICE = "Embergate Inference"

_ROWS_PER_GROUP = 5_000
_METERS = {
    INPUT: "Input Tokens",
    CACHED_INPUT: "Cached Input Tokens",
    OUTPUT: "Output Tokens",
    FREE: "Free Allocation",
}
_MILLION = Decimal(1_000_000)
_NANO = Decimal("0.000000001")
_MICRO = Decimal("0.000001")
_PICO = Decimal("0.000000000001")

_TIMES = ("BillingPeriodStart", "BillingPeriodEnd", "ChargePeriodStart", "ChargePeriodEnd")
_NUMBERS = (
    "BilledCost",
    "EffectiveCost",
    "ListCost",
    "ContractedCost",
    "ListUnitPrice",
    "ContractedUnitPrice",
    "PricingQuantity",
    "ConsumedQuantity",
)
COLUMNS = (
    *("BilledCost", "EffectiveCost", "ListCost", "ContractedCost", "BillingCurrency", "PricingCurrency"),
    *("BillingAccountId", "BillingAccountName", "BillingAccountType"),
    *("SubAccountId", "SubAccountName", "SubAccountType"),
    *_TIMES,
    *("ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency"),
    *("ServiceCategory", "ServiceSubcategory", "ServiceName"),
    *("ProviderName", "PublisherName", "InvoiceIssuerName", "InvoiceId"),
    *("SkuId", "SkuPriceId", "SkuMeter", "SkuPriceDetails"),
    *("PricingCategory", "PricingQuantity", "PricingUnit", "ListUnitPrice", "ContractedUnitPrice"),
    *("ConsumedQuantity", "ConsumedUnit"),
    *("ResourceId", "ResourceName", "ResourceType", "RegionId", "RegionName", "AvailabilityZone"),
    *("CommitmentDiscountCategory", "CommitmentDiscountId", "CommitmentDiscountName"),
    *("CommitmentDiscountStatus", "CommitmentDiscountType", "Tags"),
    *("x_TokenClass", "x_RequestCount", "x_RowId"),
)
"""Every column that FOCUS asks of a provider without regions and commitments, and three of our own."""


def focus_row(charge: ExportedCharge, currency: str) -> dict[str, Any]:
    """One row: strings, datetimes, decimals, None for what does not apply."""
    cost = Decimal(charge.amount_nanos) * _NANO
    is_credit = charge.token_class == FREE
    quantity = None if is_credit else Decimal(charge.num_tokens) / _MILLION
    price = None if is_credit else Decimal(charge.rate_micros) * _MICRO
    list_price = None if is_credit else Decimal(charge.list_micros) * _MICRO
    billing = month_period(month_text(charge.start_us))
    meter = _METERS[charge.token_class]
    sku = f"{charge.model}{':batch' if charge.is_batch else ''}"
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    return row | {
        "BilledCost": cost,
        "EffectiveCost": cost,
        "ListCost": cost if is_credit else _exact_cost(charge.num_tokens, charge.list_micros),
        "ContractedCost": cost if is_credit else _exact_cost(charge.num_tokens, charge.rate_micros),
        "BillingCurrency": currency,
        "PricingCurrency": currency,
        "BillingAccountId": SERVICE,
        "BillingAccountName": SERVICE,
        "BillingAccountType": "Installation",
        "SubAccountId": charge.account_id,
        "SubAccountName": charge.account_name,
        "SubAccountType": "Account",
        "BillingPeriodStart": _time(billing.start_us or 0),
        "BillingPeriodEnd": _time(billing.end_us or 0),
        "ChargePeriodStart": _time(charge.start_us),
        "ChargePeriodEnd": _time(charge.end_us),
        "ChargeCategory": "Credit" if is_credit else "Usage",
        "ChargeDescription": f"{meter}, {charge.model}{' in batches' if charge.is_batch else ''}",
        "ChargeFrequency": "Recurring" if is_credit else "Usage-Based",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceSubcategory": "Generative AI",
        "ServiceName": SERVICE,
        "ProviderName": PROVIDER,
        "PublisherName": PROVIDER,
        "InvoiceIssuerName": PROVIDER,
        "SkuId": None if is_credit else sku,
        "SkuPriceId": None if is_credit else f"{sku}/{charge.token_class}/{charge.rate_card_version}",
        "SkuMeter": None if is_credit else meter,
        "SkuPriceDetails": None if is_credit else json.dumps({"x_TokenClass": charge.token_class}),
        "PricingCategory": None if is_credit else "Standard",
        "PricingQuantity": quantity,
        "PricingUnit": None if is_credit else "1M Tokens",
        "ListUnitPrice": list_price,
        "ContractedUnitPrice": price,
        "ConsumedQuantity": None if is_credit else charge.num_tokens * Decimal("1.0"),
        "ConsumedUnit": None if is_credit else "Tokens",
        "ResourceId": charge.model,
        "ResourceName": charge.model,
        "ResourceType": "Model",
        "Tags": json.dumps({"token_id": charge.token_id, "token_name": charge.token_name}, sort_keys=True),
        "x_TokenClass": charge.token_class,
        "x_RequestCount": charge.num_requests,
        "x_RowId": charge.id,
    }


def write_csv(charges: Iterable[ExportedCharge], out: IO[str], currency: str) -> int:
    """With a header line; returns the number of rows."""
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    num_rows = 0
    for charge in charges:
        writer.writerow({name: _text(value) for name, value in focus_row(charge, currency).items()})
        num_rows += 1
    return num_rows


def write_parquet(charges: Iterable[ExportedCharge], out: IO[bytes], currency: str) -> int:
    """Row groups of some thousand; amounts are decimals, times are UTC. Returns the number of rows."""
    import pyarrow
    from pyarrow import parquet

    num_rows = 0
    kinds = parquet_schema()
    with parquet.ParquetWriter(out, kinds) as writer:
        for some in _groups(charges):
            rows = [focus_row(charge, currency) for charge in some]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=kinds))
            num_rows += len(rows)
    return num_rows


def parquet_schema() -> pyarrow.Schema:
    """The columns' types."""
    import pyarrow

    def kind(name: str) -> Any:
        if name in _TIMES:
            return pyarrow.timestamp("us", tz="UTC")
        if name in _NUMBERS:
            return pyarrow.decimal128(38, 12)
        return pyarrow.int64() if name == "x_RequestCount" else pyarrow.string()

    metadata = {"focus_version": FOCUS_VERSION}
    return pyarrow.schema([(name, kind(name)) for name in COLUMNS], metadata=metadata)


def _groups(charges: Iterable[ExportedCharge]) -> Iterator[list[ExportedCharge]]:
    waiting = iter(charges)
    while some := list(islice(waiting, _ROWS_PER_GROUP)):
        yield some


def _exact_cost(num_tokens: int, rate_micros: int) -> Decimal:
    """Tokens at a rate per million, to the last digit, as FOCUS wants it of unit prices and quantities."""
    return Decimal(num_tokens * rate_micros) * _PICO


def _time(instant_us: int) -> datetime:
    return datetime.fromtimestamp(instant_us // 1_000_000, UTC)


def _text(value: Any) -> Any:
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%dT%H:%M:%SZ")
    return value
