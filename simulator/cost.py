"""What a run costs on a rate card, with the cache discount and without, and what it takes in GPU hours."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from billing.rates import RateBook
from billing.usage import UsageRecord
from simulator.measures import Results

_MAX_TOKENS = 10**9
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
    """Price all tokens of a run as usage of ``model`` that starts at ``at_us``.

    Raises:
        billing.rates.NoRateError: no card of the model is in force.
    """
    charges = [rate_book.price(record) for record in _records(results, model, at_us)]
    return Bill(
        charges[0].rate_card_version,
        sum(charge.amount_nanos for charge in charges),
        sum(charge.undiscounted_nanos for charge in charges),
    )


def _records(results: Results, model: str, at_us: int) -> Iterator[UsageRecord]:
    """The tokens of a run in as many records as they need: one holds a number of 31 bits at most."""
    prompt, cached, output = results.prompt_tokens, results.cached_tokens, results.output_tokens
    is_first = True
    while prompt or is_first:
        is_first = False
        part = min(prompt, _MAX_TOKENS)
        cached_part = cached * part // prompt if prompt else 0
        output_part = output * part // prompt if prompt else output
        yield UsageRecord(
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
            prompt_tokens=part,
            cached_prompt_tokens=cached_part,
            completion_tokens=output_part,
        )
        prompt, cached, output = prompt - part, cached - cached_part, output - output_part


def tokens_per_day(results: Results) -> float:
    """Prompt and answer tokens at the rate of the run."""
    total = results.prompt_tokens + results.output_tokens
    return total / results.duration_s * _SECONDS_PER_DAY if results.duration_s else 0.0
