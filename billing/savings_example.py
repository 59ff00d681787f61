"""A published case, worked: an agent that reads 7 billion tokens a day, $2.4 million a year, 77 % saved.

Cloudflare wrote on 19 March 2026 ("workers-ai-large-models") that a security-review agent of its own
processes over 7 billion tokens a day, that this would have cost $2.4 million a year on a mid-tier
proprietary model, and that Kimi K2.5 cut the cost by 77 %. It said neither how the tokens divide into
classes nor which model it compares with. The mix below is ours: with a mid-tier list price of 3.00, 0.30
cached and 15.00 dollars per million it is close to the only one that meets both figures, and it is that of
an agent that reads much, mostly again, and says little.
"""

from __future__ import annotations

from collections.abc import Sequence

from billing.savings import DAYS_PER_YEAR, PriceList, Savings, TokenCounts, of_tokens

TOKENS_A_DAY = TokenCounts(num_input=1_256_500_000, num_cached=5_670_000_000, num_output=73_500_000)
"""7 billion: 81 % cached input, 17.95 % other input, 1.05 % output."""

KIMI = PriceList(
    name="Kimi K2.5",
    source="Workers AI price list, developers.cloudflare.com/workers-ai/platform/pricing",
    as_of="2026-08-28",
    input_micros=600_000,
    cached_micros=100_000,
    output_micros=3_000_000,
)
MID_TIER = PriceList(
    name="a mid-tier proprietary model",
    source="assumed: a common list price of such models; the publication names none",
    as_of="2026-03-19",
    input_micros=3_000_000,
    cached_micros=300_000,
    output_micros=15_000_000,
)

ASSUMPTIONS: Sequence[str] = (
    "7 billion tokens a day, every day of the year: 81 % cached input, 17.95 % other input, 1.05 % output",
    f"Kimi K2.5 at 0.60, 0.10 cached and 3.00 dollars per million ({KIMI.as_of})",
    "the mid-tier model at 3.00, 0.30 cached and 15.00 dollars per million, with the same tokens and hits",
)


def published_case() -> Savings:
    """A year of it on Kimi K2.5, compared with the mid-tier model."""
    tokens = TOKENS_A_DAY.times(DAYS_PER_YEAR)
    return of_tokens(tokens, KIMI.price(tokens), KIMI.price_uncached(tokens), [MID_TIER])
