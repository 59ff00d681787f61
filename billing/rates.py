"""Dated prices, and the one function that turns a usage record into a charge.

The card in force is decided by the request's start: cards begin at 00:00:00 UTC of their date, inclusive, and
stay in force until the model's next card begins. Prices are micro-dollars per million tokens, so one token
costs that many pico-dollars. Neurons are the outward unit: whole neurons per million tokens follow from the
price, a record's neurons are exact sums rounded once, half to even, to four decimals.
"""

from __future__ import annotations

import msgspec

from billing.config import BillingConfig
from billing.usage import UsageRecord


class NoRateError(LookupError):
    """No rate card of the model is in force at the request's start."""

    def __init__(self, model: str, at_us: int) -> None:
        super().__init__(f"no rate card for model {model!r} is in force at {at_us} us")
        self.model = model


class Rate(msgspec.Struct, frozen=True):
    """A price and what follows from it: micro-dollars, and whole neurons, per million tokens."""

    micros_per_million: int
    neurons_per_million: int


class RateCard(msgspec.Struct, frozen=True):
    """Prices of one model from ``effective_from_us`` on. ``version`` spells out the date and the three prices."""

    model: str
    effective_from_us: int
    input: Rate
    cached_input: Rate
    output: Rate
    version: str


class ChargeLine(msgspec.Struct, frozen=True):
    """One token class of a charge."""

    token_class: str
    num_tokens: int
    rate_micros: int
    amount_nanos: int


class Charge(msgspec.Struct, frozen=True):
    """A priced record.

    ``lines`` are input, cached input and output, in this order; ``amount_nanos`` is their sum.
    ``undiscounted_nanos`` is what the same record would cost if no prompt token were cached. ``neurons_e4``
    counts ten-thousandths of a neuron. A record that is not charged has no lines and all amounts zero.
    """

    lines: tuple[ChargeLine, ...]
    amount_nanos: int
    undiscounted_nanos: int
    neurons_e4: int
    rate_card_version: str

    @property
    def discount_nanos(self) -> int:
        return self.undiscounted_nanos - self.amount_nanos

    @property
    def neurons(self) -> float:
        """For display and the wire, e.g. ``1.7727``; the integer is what counts."""
        return self.neurons_e4 / 10_000


class RateBook:
    """All rate cards. Immutable, safe to share between threads; pricing takes a few microseconds."""

    @classmethod
    def from_config(cls, config: BillingConfig) -> RateBook:
        """Raises BillingConfigError naming the path of a bad price, a bad date or a duplicate card."""
        raise NotImplementedError

    def covers(self, model: str, at_us: int | None = None) -> bool:
        """Whether the model has a card (in force at ``at_us``, when given). Once in force, some card always is."""
        raise NotImplementedError

    def card_for(self, model: str, at_us: int) -> RateCard:
        """The card in force at ``at_us``. Raises NoRateError."""
        raise NotImplementedError

    def price(self, record: UsageRecord) -> Charge:
        """The charge of ``record``. Raises NoRateError for a charged record without a card in force."""
        raise NotImplementedError

    def neurons(self, model: str, at_us: int, prompt_tokens: int, cached_prompt_tokens: int,
                completion_tokens: int) -> int:
        """Neurons of such a request in ten-thousandths, for answers written before the record exists."""
        raise NotImplementedError
