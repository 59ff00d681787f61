"""What a run costs on a rate card, with the cache discount and without, and what it takes in GPU hours."""

from __future__ import annotations

import msgspec

from billing.rates import RateBook
from billing.usage import UsageRecord
from simulator.measures import Results

_SECONDS_PER_DAY = 86_400


class Bill(msgspec.Struct, frozen=True):
    """Amounts in nano-dollars of the run's tokens; ``rate_card`` is the version that priced them."""

    rate_card: str
    amount_nanos: int
    undiscounted_nanos: int

    @property
    def saved_share(self) -> float:
        """What the cache discount takes off the bill, 0 to 1."""
        return 1.0 - self.amount_nanos / self.undiscounted_nanos if self.undiscounted_nanos else 0.0


def bill_of(results: Results, rate_book: RateBook, model: str, at_us: int) -> Bill:
    """Price all tokens of a run as one request of ``model`` that starts at ``at_us``.

    Raises:
        billing.rates.NoRateError: no card of the model is in force.
    """
    charge = rate_book.price(
        UsageRecord(
            request_id="simulation",
            account_id="0" * 32,
            token_id="",
            model=model,
            requested_model=model,
            surface="run",
            replica_id="",
            session="",
            started_at_us=at_us,
            finished_at_us=at_us,
            prompt_tokens=results.prompt_tokens,
            cached_prompt_tokens=results.cached_tokens,
            completion_tokens=results.output_tokens,
        )
    )
    return Bill(charge.rate_card_version, charge.amount_nanos, charge.undiscounted_nanos)


def tokens_per_day(results: Results) -> float:
    """Prompt and answer tokens at the rate of the run."""
    total = results.prompt_tokens + results.output_tokens
    return total / results.duration_s * _SECONDS_PER_DAY if results.duration_s else 0.0
