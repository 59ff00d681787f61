"""The model catalog as clients of Workers AI list it: rows, filters, pages, and the marketplace form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta
from typing import Any, TypeVar
from uuid import NAMESPACE_URL, uuid5

import msgspec

from billing.rates import Rate, RateCard
from gateway.catalog import Catalog
from gateway.config import EMBEDDINGS_TASK, ServedModel
from gateway.errors import bad_input

_MAX_DIGITS = 9
_DEFAULT_PER_PAGE = 100
_MICROS = 1_000_000
_SHOWN_AFTER_DEPRECATION = timedelta(days=92)
_FORMATS = ("", "openrouter")
_DESCRIPTIONS = {
    "Text Generation": "Generates text, calls tools and reasons, from a conversation or a prompt.",
    "Text Embeddings": "Turns text into vectors that lie near those of texts with a like meaning.",
}

_T = TypeVar("_T")


class Price(msgspec.Struct, frozen=True):
    """What a million tokens of one class cost."""

    unit: str
    price: float
    currency: str


class Property(msgspec.Struct, frozen=True):
    property_id: str
    value: str | list[Price]


class Named(msgspec.Struct, frozen=True):
    """A task or an author."""

    id: str
    name: str
    description: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One model as ``models/search`` lists it; aliases are rows of their own."""

    id: str
    source: int
    name: str
    description: str
    task: Named
    created_at: str
    tags: list[str]
    properties: list[Property]

    def property(self, property_id: str) -> str | list[Price] | None:
        """The value of a property; absence means false."""
        return next((each.value for each in self.properties if each.property_id == property_id), None)


class PageInfo(msgspec.Struct, frozen=True):
    """``result_info`` of a page."""

    count: int
    page: int
    per_page: int
    total_count: int
    total_pages: int


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller of ``models/search`` asks for."""

    page: int = 1
    per_page: int = _DEFAULT_PER_PAGE
    task: str = ""
    author: str = ""
    source: int | None = None
    search: str = ""
    hide_experimental: bool = False
    include_deprecated: bool = False
    format: str = ""


def decode_query(parameters: Mapping[str, str]) -> Query:
    """Unknown parameters are ignored. Raises Refusal: 400, naming the wrong one."""
    wanted_format = parameters.get("format", "")
    if wanted_format not in _FORMATS:
        raise bad_input("format", "must be openrouter, or left out")
    source = parameters.get("source")
    return Query(
        page=_positive(parameters, "page", 1),
        per_page=_positive(parameters, "per_page", _DEFAULT_PER_PAGE),
        task=parameters.get("task", ""),
        author=parameters.get("author", ""),
        source=None if not source else _positive(parameters, "source", 1),
        search=parameters.get("search", ""),
        hide_experimental=_flag(parameters, "hide_experimental"),
        include_deprecated=_flag(parameters, "include_deprecated"),
        format=wanted_format,
    )


def list_rows(
    catalog: Catalog, cards: Mapping[str, RateCard], currency: str, *, since: str, takes_batches: bool
) -> list[Row]:
    """All rows. ``cards`` are those in force, by model id; ``since`` dates models whose entry does not."""
    common = [Property("async_queue", "true")] if takes_batches else []
    rows = []
    for name in catalog.names():
        model = catalog.find(name)
        rows.append(
            Row(
                id=str(uuid5(NAMESPACE_URL, name)),
                source=2 if name.startswith("@hf/") else 1,
                name=name,
                description=model.description,
                task=task_of(model),
                created_at=f"{model.created_at} 00:00:00.000" if model.created_at else since,
                tags=model.tags,
                properties=_properties(name, model, cards.get(model.id), currency, common),
            )
        )
    return rows


def select(rows: Iterable[Row], query: Query, today: date) -> list[Row]:
    """The rows that a query is after, in the order of the catalog; pages are cut by :func:`page_of`."""
    return [row for row in rows if _is_wanted(row, query, today)]


def page_of(items: Sequence[_T], query: Query) -> tuple[list[_T], PageInfo]:
    """One page; empty past the end, which is how clients know that there is no more."""
    first = (query.page - 1) * query.per_page
    page = list(items[first : first + query.per_page])
    num_pages = -(-len(items) // query.per_page)
    return page, PageInfo(len(page), query.page, query.per_page, len(items), num_pages)


def task_of(model: ServedModel) -> Named:
    """What a model is for."""
    return Named(str(uuid5(NAMESPACE_URL, model.task)), model.task, _DESCRIPTIONS.get(model.task, ""))


def author_of(name: str) -> str:
    """The author in a model's name, or "": ``@cf/AUTHOR/NAME``, ``AUTHOR/NAME``."""
    parts = name.split("/")
    if parts[0] in ("@cf", "@hf"):
        parts = parts[1:]
    return parts[0] if len(parts) > 1 else ""


def distinct(items: Iterable[Named]) -> list[Named]:
    """Without repetitions, in order."""
    return list({item.id: item for item in items}.values())


def marketplace_row(row: Row) -> dict[str, Any]:
    """A row in the form that model marketplaces read: prices in dollars per token, as decimal strings."""
    prices = row.property("price")
    by_unit = {each.unit: each.price for each in prices} if isinstance(prices, list) else {}
    window = row.property("context_window")
    sees = row.property("vision") == "true"
    parameters = ["max_tokens", "temperature", "top_p", "seed", "stop", "response_format"]
    if row.property("function_calling") == "true":
        parameters += ["tools", "tool_choice"]
    if row.property("reasoning") == "true":
        parameters.append("reasoning")
    return {
        "id": f"workers-ai/{row.name}",
        "name": row.name.rpartition("/")[2],
        "created": row.created_at,
        "context_length": int(window) if isinstance(window, str) else None,
        "architecture": {
            "input_modalities": ["text", "image"] if sees else ["text"],
            "output_modalities": ["embeddings"] if row.task.name == EMBEDDINGS_TASK else ["text"],
        },
        "pricing": {
            "prompt": _per_token(by_unit.get("per M input tokens", 0.0)),
            "completion": _per_token(by_unit.get("per M output tokens", 0.0)),
            "input_cache_read": _per_token(by_unit.get("per M cached input tokens", 0.0)),
        },
        "supported_parameters": [] if row.task.name == EMBEDDINGS_TASK else parameters,
    }


def _is_wanted(row: Row, query: Query, today: date) -> bool:
    if query.task and row.task.name.lower() != query.task.lower():
        return False
    if query.author and author_of(row.name).lower() != query.author.lower():
        return False
    if query.source is not None and row.source != query.source:
        return False
    if query.hide_experimental and row.property("beta") == "true":
        return False
    if query.search.lower() not in f"{row.name}\n{row.description}".lower():
        return False
    ends = row.property("planned_deprecation_date")
    if not isinstance(ends, str) or today < (end := date.fromisoformat(ends)):
        return True
    return query.include_deprecated and today < end + _SHOWN_AFTER_DEPRECATION


def _properties(
    name: str, model: ServedModel, card: RateCard | None, currency: str, common: Sequence[Property]
) -> list[Property]:
    properties = [Property("context_window", str(model.max_model_len))]
    if card is not None:
        properties.append(Property("price", _prices(model, card, currency)))
    if name != model.id:
        properties.append(Property("alias_of", model.id))
    if model.sees_images and "vision" not in model.properties:
        properties.append(Property("vision", "true"))
    properties += [each for each in common if each.property_id not in model.properties]
    return properties + [Property(key, value) for key, value in model.properties.items()]


def _prices(model: ServedModel, card: RateCard, currency: str) -> list[Price]:
    rates: list[tuple[str, Rate]] = [("input", card.input)]
    if model.task != EMBEDDINGS_TASK:
        rates += [("output", card.output), ("cached input", card.cached_input)]
    return [
        Price(f"per M {kind} tokens", rate.micros_per_million / _MICROS, currency) for kind, rate in rates
    ]


def _per_token(price: float) -> str:
    return f"{price / _MICROS:.12f}".rstrip("0").rstrip(".")


def _positive(parameters: Mapping[str, str], name: str, default: int) -> int:
    given = parameters.get(name)
    if not given:
        return default
    if not (given.isascii() and given.isdigit() and len(given) <= _MAX_DIGITS) or int(given) < 1:
        raise bad_input(name, "must be a whole number from 1 on")
    return int(given)


def _flag(parameters: Mapping[str, str], name: str) -> bool:
    given = parameters.get(name, "").lower()
    if given not in ("", "true", "false", "1", "0"):
        raise bad_input(name, "must be true or false")
    return given in ("true", "1")
