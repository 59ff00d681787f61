"""Dated prices, and the one function that turns a usage record into a charge.

The card in force is decided by the request's start: cards begin at 00:00:00 UTC of their date, inclusive, and
stay in force until the model's next card begins. An account may have cards of its own, and batches prices of
their own. Prices are micro-dollars per million tokens, so one token
costs that many pico-dollars. Neurons are the outward unit: whole neurons per million tokens follow from the
price, and a record's neurons are the exact sum rounded once, half to even, to four decimals.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from billing.config import BatchPricesConfig, BillingConfig, BillingConfigError, RateCardConfig
from billing.money import line_nanos, parse_micros, round_half_even
from billing.periods import day_start_us, parse_date
from billing.usage import CHARGED_STATUSES, Surface, UsageRecord

INPUT, CACHED_INPUT, OUTPUT = ("input", "cached_input", "output")

_MAX_MICROS = 1_000_000 * 1_000_000  # a million dollars per million tokens; keeps every sum in 64 bits
_MICRO_NEURONS_PER_E4 = 100
_CURRENCY = re.compile(r"[A-Z]{3}", re.ASCII)
_ACCOUNT_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)

_T = TypeVar("_T")


class NoRateError(LookupError):
    """No rate card of the model is in force at the request's start."""

    def __init__(self, model: str, at_us: int) -> None:
        super().__init__(f"no rate card for model {model!r} is in force at {at_us} us")
        self.model = model


class Rate(msgspec.Struct, frozen=True):
    """A price and what follows from it: micro-dollars, and whole neurons, per million tokens."""

    micros_per_million: int
    neurons_per_million: int


class RateCard(msgspec.Struct, frozen=True, kw_only=True):
    """Prices of one model from ``effective_from_us`` on. ``version`` spells out the date and the prices.

    ``account_id`` not "": for this account alone, and until ``effective_until_us`` where that is given.
    ``batch`` is the card of requests that come through a batch; None when they pay the same.
    """

    model: str
    effective_from_us: int
    input: Rate
    cached_input: Rate
    output: Rate
    version: str
    account_id: str = ""
    effective_until_us: int | None = None
    batch: RateCard | None = None


class ChargeLine(msgspec.Struct, frozen=True):
    """One token class of a charge; ``rate_micros`` is in micro-dollars per million tokens."""

    token_class: str
    num_tokens: int
    rate_micros: int
    amount_nanos: int


class Charge(msgspec.Struct, frozen=True):
    """A priced record.

    ``lines`` are input, cached input and output, in this order. ``free_nanos`` of their sum are covered by
    the account's free allocation; ``amount_nanos`` is the rest. ``undiscounted_nanos`` is what the same
    request would cost at the input rate for cached tokens, so that a card without a discount gives a discount
    of exactly nothing. ``neurons_e4`` counts ten-thousandths of a neuron, free ones among them. A record that
    is not charged has no lines, no card and all amounts zero.
    """

    lines: tuple[ChargeLine, ...]
    amount_nanos: int
    undiscounted_nanos: int
    neurons_e4: int
    rate_card_version: str
    free_nanos: int = 0

    @property
    def discount_nanos(self) -> int:
        return self.undiscounted_nanos - self.amount_nanos

    @property
    def neurons(self) -> float:
        """For display and the wire, e.g. ``1.7727``; the integer is what counts."""
        return self.neurons_e4 / 10_000


NO_CHARGE = Charge((), 0, 0, 0, "")
"""For a record that costs nothing: a failure of ours."""

UNPRICED = Charge((), 0, 0, 0, "unpriced")
"""For a record that should cost something, but no card is in force: kept, and reported by the audit."""


class RateBook:
    """All rate cards. Immutable, safe to share between threads; pricing takes a few microseconds."""

    def __init__(self, cards: Sequence[RateCard], currency: str = "USD") -> None:
        """``cards`` in any order, at most one per model, account and date."""
        self.currency = currency
        self._timelines: dict[str, _Timeline] = {}
        self._of_accounts: dict[tuple[str, str], _Timeline] = {}
        for card in sorted(cards, key=lambda card: card.effective_from_us):
            if card.account_id:
                self._of_accounts.setdefault((card.model, card.account_id), _Timeline()).append(card)
            else:
                self._timelines.setdefault(card.model, _Timeline()).append(card)

    @classmethod
    def from_config(cls, config: BillingConfig) -> RateBook:
        """Raises BillingConfigError naming the path of a bad price, a bad date or a duplicate card."""
        neuron_micros = _neuron_micros(config.usd_per_thousand_neurons)
        if _CURRENCY.fullmatch(config.currency) is None:
            raise BillingConfigError("billing.currency", f"{config.currency!r} is not a three-letter code")
        cards: list[RateCard] = []
        seen: dict[tuple[str, str, int], str] = {}
        for index, card_config in enumerate(config.rate_cards):
            path = f"billing.rate_cards[{index}]"
            card = _card(path, card_config, neuron_micros)
            first = seen.setdefault((card.model, card.account_id, card.effective_from_us), path)
            if first != path:
                raise BillingConfigError(
                    path, f"{card.model} has a card from {card_config.effective_from} already, at {first}"
                )
            cards.append(card)
        return cls(cards, config.currency)

    @property
    def cards(self) -> tuple[RateCard, ...]:
        """All of them, of each model and account by their start."""
        timelines = (*self._timelines.values(), *self._of_accounts.values())
        return tuple(card for timeline in timelines for card in timeline.cards)

    def covers(self, model: str, at_us: int | None = None) -> bool:
        """Whether the model has a card for everybody; with ``at_us``, one in force then. Those never end
        without a next.
        """
        timeline = self._timelines.get(model)
        return timeline is not None and (at_us is None or timeline.starts[0] <= at_us)

    def card_for(self, model: str, at_us: int, account_id: str = "", surface: Surface = "run") -> RateCard:
        """The card in force at ``at_us``: the account's own before that of everybody. Raises NoRateError."""
        card = None
        if self._of_accounts:
            own = self._of_accounts.get((model, account_id))
            card = None if own is None else own.at(at_us)
        if card is None:
            timeline = self._timelines.get(model)
            card = None if timeline is None else timeline.at(at_us)
        if card is None:
            raise NoRateError(model, at_us)
        return card.batch if surface == "batch" and card.batch is not None else card

    def price(self, record: UsageRecord) -> Charge:
        """The charge of ``record``. Raises NoRateError for a charged record without a card in force."""
        if record.status not in CHARGED_STATUSES:
            return NO_CHARGE
        card = self.card_for(record.model, record.started_at_us, record.account_id, record.surface)
        num_cached = record.cached_prompt_tokens
        num_input = record.prompt_tokens - num_cached
        num_output = record.completion_tokens
        input_micros = card.input.micros_per_million
        cached_micros = card.cached_input.micros_per_million
        output_micros = card.output.micros_per_million
        input_nanos = line_nanos(num_input, input_micros)
        cached_nanos = line_nanos(num_cached, cached_micros)
        output_nanos = line_nanos(num_output, output_micros)
        gross_nanos = input_nanos + cached_nanos + output_nanos
        neurons_e4 = _neurons_e4(card, num_input, num_cached, num_output)
        free_nanos = 0
        if record.free_neurons_e4:
            free_nanos = _free_nanos(gross_nanos, record.free_neurons_e4, neurons_e4)
        return Charge(
            (
                ChargeLine(INPUT, num_input, input_micros, input_nanos),
                ChargeLine(CACHED_INPUT, num_cached, cached_micros, cached_nanos),
                ChargeLine(OUTPUT, num_output, output_micros, output_nanos),
            ),
            gross_nanos - free_nanos,
            input_nanos + line_nanos(num_cached, input_micros) + output_nanos - free_nanos,
            neurons_e4,
            card.version,
            free_nanos,
        )

    def neurons(
        self,
        model: str,
        at_us: int,
        prompt_tokens: int,
        cached_prompt_tokens: int,
        completion_tokens: int,
        account_id: str = "",
        surface: Surface = "run",
    ) -> int:
        """Neurons of such a request in ten-thousandths, for answers written before the record exists."""
        card = self.card_for(model, at_us, account_id, surface)
        return _neurons_e4(
            card, prompt_tokens - cached_prompt_tokens, cached_prompt_tokens, completion_tokens
        )


class _Timeline:
    """The cards of one model, for everybody or for one account, by their start."""

    __slots__ = ("cards", "starts")

    def __init__(self) -> None:
        self.cards: list[RateCard] = []
        self.starts: list[int] = []

    def append(self, card: RateCard) -> None:
        """``card`` begins after those before it."""
        self.cards.append(card)
        self.starts.append(card.effective_from_us)

    def at(self, at_us: int) -> RateCard | None:
        index = bisect_right(self.starts, at_us)
        if not index:
            return None
        card = self.cards[index - 1]
        if card.effective_until_us is not None and at_us >= card.effective_until_us:
            return None
        return card


def rates_of_version(version: str) -> tuple[int, int, int]:
    """Input, cached input and output rate of a ``RateCard.version``, in micro-dollars per million tokens."""
    first, second, third = version.split(" ")[1].split("/")
    return int(first), int(second), int(third)


def _neurons_e4(card: RateCard, num_input: int, num_cached: int, num_output: int) -> int:
    micro_neurons = (
        num_input * card.input.neurons_per_million
        + num_cached * card.cached_input.neurons_per_million
        + num_output * card.output.neurons_per_million
    )
    return round_half_even(micro_neurons, _MICRO_NEURONS_PER_E4)


def _free_nanos(gross_nanos: int, free_neurons_e4: int, neurons_e4: int) -> int:
    """The part of a price that free neurons cover: all of it, or in proportion, rounded once."""
    if free_neurons_e4 >= neurons_e4:
        return gross_nanos
    return round_half_even(gross_nanos * free_neurons_e4, neurons_e4)


def _card(path: str, config: RateCardConfig, neuron_micros: int) -> RateCard:
    if not config.model:
        raise BillingConfigError(f"{path}.model", "is empty")
    day = _parsed(f"{path}.effective_from", parse_date, config.effective_from)
    until_us = None
    if config.account is not None and _ACCOUNT_ID.fullmatch(config.account) is None:
        raise BillingConfigError(f"{path}.account", f"{config.account!r} is not 32 hexadecimal characters")
    if config.effective_until is not None:
        until = _parsed(f"{path}.effective_until", parse_date, config.effective_until)
        if config.account is None:
            raise BillingConfigError(f"{path}.effective_until", "is for cards of one account only")
        if until <= day:
            raise BillingConfigError(f"{path}.effective_until", "is not after effective_from")
        until_us = day_start_us(until)
    card = _card_of_prices(path, config, config, neuron_micros, "account" if config.account else "")
    batch = config.batch
    return msgspec.structs.replace(
        card,
        account_id=config.account or "",
        effective_until_us=until_us,
        batch=batch and _card_of_prices(f"{path}.batch", config, batch, neuron_micros, "batch"),
    )


def _card_of_prices(
    path: str,
    config: RateCardConfig,
    prices: RateCardConfig | BatchPricesConfig,
    neuron_micros: int,
    kind: str,
) -> RateCard:
    cached_text = prices.input if prices.cached_input is None else prices.cached_input
    input_rate = _rate(f"{path}.input", prices.input, neuron_micros)
    cached_rate = _rate(f"{path}.cached_input", cached_text, neuron_micros)
    output_rate = _rate(f"{path}.output", prices.output, neuron_micros)
    rates = "/".join(str(rate.micros_per_million) for rate in (input_rate, cached_rate, output_rate))
    return RateCard(
        model=config.model,
        effective_from_us=day_start_us(parse_date(config.effective_from)),
        input=input_rate,
        cached_input=cached_rate,
        output=output_rate,
        version=f"{config.effective_from} {rates} {kind}".rstrip(),
    )


def _rate(path: str, text: str, neuron_micros: int) -> Rate:
    micros = _parsed(path, parse_micros, text)
    if micros > _MAX_MICROS:
        raise BillingConfigError(path, f"{text} is more than 1000000 per million tokens")
    return Rate(micros, round_half_even(micros * 1_000, neuron_micros))


def _neuron_micros(text: str) -> int:
    """Micro-dollars per thousand neurons."""
    path = "billing.usd_per_thousand_neurons"
    micros = _parsed(path, parse_micros, text)
    if micros == 0:
        raise BillingConfigError(path, "must be more than 0")
    return micros


def _parsed(path: str, parse: Callable[[str], _T], text: str) -> _T:
    try:
        return parse(text)
    except ValueError as error:
        raise BillingConfigError(path, str(error)) from None
