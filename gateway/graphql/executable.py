"""The schema with its resolvers, and how one query is carried out. Synchronous: it reads the database."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgspec
from graphql import (
    ExecutionResult,
    FieldNode,
    FragmentSpreadNode,
    GraphQLError,
    GraphQLObjectType,
    GraphQLResolveInfo,
    GraphQLScalarType,
    GraphQLSchema,
    InlineFragmentNode,
    SelectionSetNode,
    build_schema,
    execute_sync,
    parse,
    validate,
)
from sqlalchemy import Connection

from billing.accounts import Principal
from billing.analytics import Dimension, UsageFilter, can_have_latency, latencies, usage_groups
from billing.latency import LatencySummary
from billing.usage_log import usage_requests
from gateway.config import AnalyticsConfig
from gateway.graphql.bounds import ShapeLimits
from gateway.graphql.filters import DIMENSION_OF, groups_order, usage_filter
from gateway.graphql.query import Query
from gateway.graphql.rows import group_row, parse_day, parse_time, request_row
from gateway.graphql.schema import SCHEMA
from gateway.readers import may_read

_MAX_TOKENS = 2_000
_MAX_ERRORS = 5

Info = GraphQLResolveInfo[Any]


class Context(msgspec.Struct, frozen=True):
    """What resolvers know: who asks, of which state of the database, within which limits."""

    connection: Connection
    principal: Principal
    config: AnalyticsConfig


def run_query(query: Query, context: Context) -> dict[str, Any]:
    """The answer, with ``data`` and ``errors``, null where there are none, as clients of Workers AI expect.

    Raises:
        billing.store.StoreError: the database does not answer, or not in time.
    """
    schema = executable_schema()
    config = context.config
    try:
        document = parse(query.query, max_tokens=_MAX_TOKENS)
        errors = validate(schema, document, max_errors=_MAX_ERRORS)
        if not errors:
            ShapeLimits(config.max_query_depth, config.max_query_fields).check(document)
    except GraphQLError as error:
        errors = [error]
    if errors:
        return {"data": None, "errors": [error.formatted for error in errors]}
    result = execute_sync(
        schema,
        document,
        context_value=context,
        variable_values=query.variables,
        operation_name=query.operation_name,
    )
    return _formatted(result)


@cache
def executable_schema() -> GraphQLSchema:
    """The schema with its resolvers; made once, it never changes."""
    schema = build_schema(SCHEMA)
    _set_resolvers(schema, "Query", viewer=lambda _root, _info: {})
    _set_resolvers(schema, "Viewer", accounts=_accounts)
    _set_resolvers(
        schema, "Account", aiInferenceAdaptiveGroups=_adaptive_groups, aiInferenceAdaptive=_adaptive
    )
    _set_parser(schema, "Date", parse_day)
    _set_parser(schema, "Time", parse_time)
    return schema


def _formatted(result: ExecutionResult) -> dict[str, Any]:
    for error in result.errors or ():
        if error.original_error is not None and not isinstance(error.original_error, GraphQLError):
            raise error.original_error
    errors = None if result.errors is None else [error.formatted for error in result.errors]
    return {"data": result.data, "errors": errors}


def _accounts(
    _viewer: object,
    info: Info,
    filter: Mapping[str, Any] | None = None,  # noqa: A002
    limit: int | None = None,
) -> list[dict[str, str]]:
    context: Context = info.context
    account_id = (filter or {}).get("accountTag") or context.principal.account_id
    if not may_read(context.principal, account_id):
        raise GraphQLError(
            f"not authorized for that account: {account_id[:64]}", extensions={"code": "authz"}
        )
    return [{"account_id": account_id}]


def _adaptive_groups(
    account: Mapping[str, str],
    info: Info,
    limit: int,
    filter: Mapping[str, Any] | None = None,  # noqa: A002
    orderBy: list[str] | None = None,  # noqa: N803
) -> list[dict[str, Any]]:
    context: Context = info.context
    _check_limit(limit, context.config)
    wanted = usage_filter(account["account_id"], filter or {})
    selected = _selected_below(info, "dimensions")
    by = tuple(dimension for name, dimension in DIMENSION_OF.items() if name in selected)
    try:
        page = usage_groups(context.connection, wanted, by, order=groups_order(orderBy, by), limit=limit)
    except ValueError as error:
        raise GraphQLError(str(error)) from None
    found = {}
    if _selected_below(info, "quantiles"):
        found = _quantiles(context.connection, wanted, by)
    rows = page.rows if by else [row for row in page.rows if row.num_requests]
    return [group_row(row, found.get(tuple(row.dimensions.values()))) for row in rows]


def _adaptive(
    account: Mapping[str, str],
    info: Info,
    limit: int,
    filter: Mapping[str, Any] | None = None,  # noqa: A002
    orderBy: list[str] | None = None,  # noqa: N803
) -> list[dict[str, Any]]:
    context: Context = info.context
    _check_limit(limit, context.config)
    wanted = usage_filter(account["account_id"], filter or {})
    is_ascending = (orderBy or [""])[0] == "datetime_ASC"
    page = usage_requests(context.connection, wanted, limit=limit, is_ascending=is_ascending)
    return [request_row(row) for row in page.rows]


def _quantiles(
    connection: Connection, wanted: UsageFilter, by: tuple[Dimension, ...]
) -> dict[tuple[str | int, ...], LatencySummary]:
    return latencies(connection, wanted, by) if can_have_latency(wanted, by) else {}


def _check_limit(limit: int, config: AnalyticsConfig) -> None:
    if not 1 <= limit <= config.max_rows:
        raise GraphQLError(f"limit must be positive number and not greater than {config.max_rows}")


def _selected_below(info: Info, name: str) -> set[str]:
    """Fields selected of the field ``name`` of what is being resolved, wherever fragments put them."""
    found: set[str] = set()

    def visit(selected: SelectionSetNode, is_inside: bool) -> None:
        for node in selected.selections:
            if isinstance(node, FieldNode):
                if is_inside:
                    found.add(node.name.value)
                elif node.name.value == name and node.selection_set is not None:
                    visit(node.selection_set, True)
            elif isinstance(node, FragmentSpreadNode):
                visit(info.fragments[node.name.value].selection_set, is_inside)
            elif isinstance(node, InlineFragmentNode):
                visit(node.selection_set, is_inside)

    for node in info.field_nodes:
        if node.selection_set is not None:
            visit(node.selection_set, False)
    return found


def _set_resolvers(schema: GraphQLSchema, type_name: str, **resolvers: Callable[..., Any]) -> None:
    kind = schema.type_map[type_name]
    assert isinstance(kind, GraphQLObjectType)
    for name, resolver in resolvers.items():
        kind.fields[name].resolve = resolver


def _set_parser(schema: GraphQLSchema, type_name: str, parse_value: Callable[[Any], int]) -> None:
    """Values of the scalar arrive as microseconds, whether written in the query or in a variable."""
    scalar = schema.type_map[type_name]
    assert isinstance(scalar, GraphQLScalarType)
    scalar.coerce_input_value = parse_value
