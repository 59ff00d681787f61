"""What caching saves: the same usage on other price lists, without the discount, and without caching at all.

Everything is an integer sum priced once per token class, so a comparison is exact for the tokens that it
compares. It assumes that the other list's model would have used the same tokens, and its cache would have
hit as ours did.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection, func, select

from billing.analytics import UsageFilter, usage_groups
from billing.batch_schema import batch_items, batches
from billing.config import BillingConfig, BillingConfigError, PriceListConfig
from billing.money import NANOS_PER_MICRO, format_nanos, line_nanos, parse_micros
from billing.periods import parse_date
from billing.schema import ledger_transactions
from billing.usage import CHARGED_STATUSES

DAYS_PER_YEAR = 365


class TokenCounts(msgspec.Struct, frozen=True):
    """Tokens by class: ``num_input`` were computed, ``num_cached`` came from the cache."""

    num_input: int
    num_cached: int
    num_output: int

    @property
    def num_tokens(self) -> int:
        return self.num_input + self.num_cached + self.num_output

    @property
    def cached_share(self) -> float:
        """Cached over all prompt tokens; 0 when there are none."""
        num_prompt = self.num_input + self.num_cached
        return self.num_cached / num_prompt if num_prompt else 0.0

    def times(self, factor: int) -> TokenCounts:
        return TokenCounts(self.num_input * factor, self.num_cached * factor, self.num_output * factor)


class PriceList(msgspec.Struct, frozen=True, kw_only=True):
    """Prices in micro-dollars per million tokens, as they were published at ``source`` on ``as_of``."""

    name: str
    source: str
    as_of: str
    input_micros: int
    cached_micros: int
    output_micros: int

    def price(self, tokens: TokenCounts) -> int:
        """Nano-dollars."""
        return (
            line_nanos(tokens.num_input, self.input_micros)
            + line_nanos(tokens.num_cached, self.cached_micros)
            + line_nanos(tokens.num_output, self.output_micros)
        )

    def price_uncached(self, tokens: TokenCounts) -> int:
        """Nano-dollars when every prompt token is computed."""
        return self.price(TokenCounts(tokens.num_input + tokens.num_cached, 0, tokens.num_output))


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The usage on one price list. ``saved_*`` is against it and negative where it is cheaper."""

    name: str
    source: str
    as_of: str
    input: str
    cached_input: str
    output: str
    amount_nanos: int
    uncached_nanos: int
    saved_nanos: int
    saved_share: float
    amount: str
    uncached: str
    saved: str


class Savings(msgspec.Struct, frozen=True, kw_only=True):
    """Charged usage: what it cost, and would have cost.

    ``undiscounted_nanos`` is the same with cached tokens at the price of input, which is also what it would
    cost without a cache; then ``num_recomputed`` more prompt tokens would have had to be computed.
    """

    num_requests: int
    tokens: TokenCounts
    cached_share: float
    currency: str
    amount_nanos: int
    undiscounted_nanos: int
    saved_nanos: int
    saved_share: float
    amount: str
    undiscounted: str
    saved: str
    num_recomputed: int
    computed_factor: float
    comparisons: list[Comparison]


def price_lists(config: BillingConfig) -> list[PriceList]:
    """The configured lists to compare with. Raises BillingConfigError naming a bad price or date."""
    return [
        _price_list(f"billing.comparisons[{index}]", given) for index, given in enumerate(config.comparisons)
    ]


def savings(
    connection: Connection, wanted: UsageFilter, lists: Sequence[PriceList], *, currency: str = "USD"
) -> Savings:
    """Over the charged requests that ``wanted`` means."""
    charged = tuple(
        status for status in sorted(CHARGED_STATUSES) if not wanted.statuses or status in wanted.statuses
    )
    if not charged:
        return of_tokens(TokenCounts(0, 0, 0), 0, 0, lists, currency=currency)
    [row] = usage_groups(connection, msgspec.structs.replace(wanted, statuses=charged)).rows
    tokens = TokenCounts(
        row.prompt_tokens - row.cached_prompt_tokens, row.cached_prompt_tokens, row.completion_tokens
    )
    return of_tokens(
        tokens,
        row.amount_nanos,
        row.undiscounted_nanos,
        lists,
        currency=currency,
        num_requests=row.num_requests,
    )


def batch_savings(
    connection: Connection,
    account_id: str,
    batch_id: str,
    lists: Sequence[PriceList],
    *,
    currency: str = "USD",
) -> Savings | None:
    """Over the items of a batch that are on the books; None when the account has no such batch."""
    owned = select(batches.c.id).where(batches.c.id == batch_id, batches.c.account_id == account_id)
    if connection.execute(owned).one_or_none() is None:
        return None
    item, entry = batch_items.c, ledger_transactions.c
    sums = [
        func.coalesce(func.sum(column), 0)
        for column in (
            item.prompt_tokens,
            item.cached_prompt_tokens,
            item.completion_tokens,
            entry.amount_nanos,
            entry.undiscounted_nanos,
        )
    ]
    on_the_books = batch_items.join(ledger_transactions, item.request_id == entry.id)
    query = select(func.count(), *sums).select_from(on_the_books).where(item.batch_id == batch_id)
    row = connection.execute(query).one()
    num_requests, prompt, cached, output, amount, undiscounted = (int(value) for value in row)
    return of_tokens(
        TokenCounts(prompt - cached, cached, output),
        amount,
        undiscounted,
        lists,
        currency=currency,
        num_requests=num_requests,
    )


def of_tokens(
    tokens: TokenCounts,
    amount_nanos: int,
    undiscounted_nanos: int,
    lists: Sequence[PriceList],
    *,
    currency: str = "USD",
    num_requests: int = 0,
) -> Savings:
    """For tokens that cost ``amount_nanos``, and ``undiscounted_nanos`` without the discount."""
    saved = undiscounted_nanos - amount_nanos
    num_prompt = tokens.num_input + tokens.num_cached
    return Savings(
        num_requests=num_requests,
        tokens=tokens,
        cached_share=tokens.cached_share,
        currency=currency,
        amount_nanos=amount_nanos,
        undiscounted_nanos=undiscounted_nanos,
        saved_nanos=saved,
        saved_share=saved / undiscounted_nanos if undiscounted_nanos else 0.0,
        amount=format_nanos(amount_nanos),
        undiscounted=format_nanos(undiscounted_nanos),
        saved=format_nanos(saved),
        num_recomputed=tokens.num_cached,
        computed_factor=num_prompt / tokens.num_input if tokens.num_input else 1.0,
        comparisons=[_compared(tokens, amount_nanos, each) for each in lists],
    )


def _compared(tokens: TokenCounts, amount_nanos: int, other: PriceList) -> Comparison:
    theirs = other.price(tokens)
    uncached = other.price_uncached(tokens)
    saved = theirs - amount_nanos
    return Comparison(
        name=other.name,
        source=other.source,
        as_of=other.as_of,
        input=format_nanos(other.input_micros * NANOS_PER_MICRO),
        cached_input=format_nanos(other.cached_micros * NANOS_PER_MICRO),
        output=format_nanos(other.output_micros * NANOS_PER_MICRO),
        amount_nanos=theirs,
        uncached_nanos=uncached,
        saved_nanos=saved,
        saved_share=saved / theirs if theirs else 0.0,
        amount=format_nanos(theirs),
        uncached=format_nanos(uncached),
        saved=format_nanos(saved),
    )


def _price_list(path: str, given: PriceListConfig) -> PriceList:
    if not given.name or not given.source:
        raise BillingConfigError(path, "needs a name and a source")
    try:
        parse_date(given.as_of)
    except ValueError as error:
        raise BillingConfigError(f"{path}.as_of", str(error)) from None
    prices = {
        "input": given.input,
        "cached_input": given.input if given.cached_input is None else given.cached_input,
        "output": given.output,
    }
    micros = {}
    for name, text in prices.items():
        try:
            micros[name] = parse_micros(text)
        except ValueError as error:
            raise BillingConfigError(f"{path}.{name}", str(error)) from None
    return PriceList(
        name=given.name,
        source=given.source,
        as_of=given.as_of,
        input_micros=micros["input"],
        cached_micros=micros["cached_input"],
        output_micros=micros["output"],
    )
