"""The routes below ``/dashboard``: sign in, pages, sign out. Only signing in and out changes anything."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from urllib.parse import quote

import msgspec
from aiohttp import web
from sqlalchemy import Connection

from billing.accounts import ANALYTICS_PERMISSION, Principal, hash_token
from billing.analytics import DIMENSIONS, Dimension
from billing.budgets import BudgetBook
from billing.receipt_keys import KeyRing
from billing.receipts import sign
from billing.savings import PriceList
from billing.savings_example import ASSUMPTIONS, published_case
from billing.sign_outs import SignOuts, is_signed_out
from gateway.auth import Authenticator
from gateway.batches.archive import BatchArchive
from gateway.config import DashboardConfig
from gateway.dashboard import views
from gateway.dashboard.rendering import Pages, StaticFiles
from gateway.dashboard.scope import RANGES, Scope, scope_of
from gateway.dashboard.session import FORM_FIELD, Sessions
from gateway.errors import Refusal
from gateway.reading import UsageReader
from gateway.replicas import ReplicaTable
from gateway.wire.usage_query import REQUESTS, decode_request_cursor, encode_cursor

_Handler = Callable[[web.Request, Scope], Awaitable[web.Response]]

_HOME = "/dashboard"
_SIGN_IN = "/dashboard/sign-in"
_MAX_FORM_BYTES = 16_384
_USAGE_BY: tuple[Dimension, ...] = ("model", "token", "session", "surface", "status", "day")


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """Where pages read from."""

    reader: UsageReader
    budgets: BudgetBook
    sign_outs: SignOuts
    batches: BatchArchive
    table: ReplicaTable
    price_lists: Sequence[PriceList]
    receipt_for: views.ReceiptFinder
    receipt_keys: KeyRing
    currency: str


class DashboardRoutes:
    """Handlers of all pages. A customer sees its own account, an operator all of them."""

    def __init__(
        self, authenticator: Authenticator, sources: Sources, sessions: Sessions, config: DashboardConfig
    ) -> None:
        """Reads the templates and static files. Raises MissingChartsError."""
        self._authenticator = authenticator
        self._sources = sources
        self._sessions = sessions
        self._config = config
        self._pages = Pages(sources.currency)
        self._static = StaticFiles()

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get("/dashboard/sign-in", self.sign_in_form)
        router.add_post("/dashboard/sign-in", self.sign_in)
        router.add_post("/dashboard/sign-out", self.sign_out)
        router.add_get("/dashboard/static/{name}", self.static)
        router.add_get("/dashboard", self._signed_in(self.overview))
        router.add_get("/dashboard/usage", self._signed_in(self.usage))
        router.add_get("/dashboard/requests", self._signed_in(self.requests))
        router.add_get("/dashboard/requests/{request_id}", self._signed_in(self.request))
        router.add_get("/dashboard/requests/{request_id}/receipt", self._signed_in(self.receipt))
        router.add_get("/dashboard/batches", self._signed_in(self.batches))
        router.add_get("/dashboard/replicas", self._signed_in(self.replicas))
        router.add_get("/dashboard/savings", self._signed_in(self.savings))
        router.add_get("/dashboard/", self.home)
        router.add_get("/dashboard/{path:.+}", self._signed_in(self.unknown))

    # -- signing in and out --------------------------------------------------------------------------------

    async def sign_in_form(self, request: web.Request) -> web.Response:
        """Where an API token is shown."""
        try:
            is_signed_in = await self._principal(request) is not None
        except Refusal as refusal:
            return self._refused(refusal)
        return _redirect(_HOME) if is_signed_in else self._sign_in_page(request)

    async def sign_in(self, request: web.Request) -> web.Response:
        """Check the token, set the cookie, go where the reader wanted to."""
        if (request.content_length or 0) > _MAX_FORM_BYTES:
            return self._sign_in_page(request, "That is no API token.", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        form = await request.post()
        if not self._sessions.is_own_form(request, str(form.get(FORM_FIELD, ""))):
            return self._sign_in_page(
                request, "The form was too old. Please try again.", HTTPStatus.FORBIDDEN
            )
        token_hash = hash_token(str(form.get("token", "")).strip())
        principal = await self._authenticator.recognize(token_hash)
        if principal is None:
            return self._sign_in_page(request, "This API token is not valid.", HTTPStatus.UNAUTHORIZED)
        if ANALYTICS_PERMISSION not in principal.permissions:
            message = f"This API token lacks the permission {ANALYTICS_PERMISSION}."
            return self._sign_in_page(request, message, HTTPStatus.FORBIDDEN)
        response = _redirect(_local(str(form.get("next", ""))))
        self._sessions.begin(response, token_hash)
        return response

    async def sign_out(self, request: web.Request) -> web.Response:
        """Drop the cookie, and end the session for whoever has a copy of it."""
        is_short = (request.content_length or 0) <= _MAX_FORM_BYTES
        form = await request.post() if is_short else {}
        if not self._sessions.is_own_form(request, str(form.get(FORM_FIELD, ""))):
            return self._pages.page(
                "refused.html",
                HTTPStatus.FORBIDDEN,
                title="Not signed out",
                message="The form was too old. You are still signed in; please sign out again.",
                home=_HOME,
            )
        session = self._sessions.session(request.cookies)
        if session is not None:
            end, ttl_s = self._sources.sign_outs.end, self._sessions.ttl_s
            try:
                await self._sources.reader.call(lambda: end(session.id, ttl_s))
            except Refusal as refusal:
                return self._refused(refusal)
        response = _redirect(_SIGN_IN)
        self._sessions.end(response)
        return response

    async def home(self, request: web.Request) -> web.Response:
        """The address with a slash at its end."""
        return _redirect(_HOME)

    async def static(self, request: web.Request) -> web.Response:
        """Script and style."""
        return self._static.answer(request)

    # -- pages ---------------------------------------------------------------------------------------------

    async def overview(self, request: web.Request, scope: Scope) -> web.Response:
        """Spend, cached share, latency, budgets, what is dearest."""
        sources = self._sources
        view = await sources.reader.read(lambda connection: views.overview(connection, scope))
        states = await sources.reader.call(lambda: sources.budgets.states(scope.account_id))
        return self._page(request, scope, "overview.html", budgets=states, **view)

    async def usage(self, request: web.Request, scope: Scope) -> web.Response:
        """Tokens and money by one dimension."""
        offered = _USAGE_BY if not scope.is_operator else ("account", *_USAGE_BY)
        asked = request.query.get("by", "model")
        by: Dimension = next((each for each in offered if each == asked), "model")
        assert by in DIMENSIONS
        view = await self._sources.reader.read(lambda connection: views.usage(connection, scope, by))
        return self._page(request, scope, "usage.html", offered=offered, **view)

    async def requests(self, request: web.Request, scope: Scope) -> web.Response:
        """Single requests."""
        try:
            after = decode_request_cursor(request.query.get("after", ""), REQUESTS)
        except Refusal:
            after = None
        num_rows = self._config.num_requests
        view = await self._sources.reader.read(
            lambda connection: views.requests(connection, scope, after, num_rows)
        )
        cursor = encode_cursor(view["next_after"], REQUESTS)
        return self._page(request, scope, "requests.html", cursor=cursor, **view)

    async def request(self, request: web.Request, scope: Scope) -> web.Response:
        """One request with its line items."""
        request_id = request.match_info["request_id"]
        view = await self._sources.reader.read(
            lambda connection: views.request(connection, scope, request_id, self._sources.receipt_for)
        )
        if view is None:
            return self._page(
                request, scope, "error.html", HTTPStatus.NOT_FOUND, message="There is no such request."
            )
        return self._page(request, scope, "request.html", **view)

    async def receipt(self, request: web.Request, scope: Scope) -> web.Response:
        """The signed receipt, to keep."""
        sources, request_id = self._sources, request.match_info["request_id"]
        view = await sources.reader.read(
            lambda connection: views.request(connection, scope, request_id, sources.receipt_for)
        )
        if view is None or view["receipt"] is None:
            return self._page(
                request, scope, "error.html", HTTPStatus.NOT_FOUND, message="There is no such request."
            )
        signed = sign(view["receipt"], await sources.reader.call(sources.receipt_keys.signing_key))
        name = quote(request_id, safe="")
        return web.Response(
            body=msgspec.json.encode(signed),
            content_type="application/json",
            headers={"content-disposition": f'attachment; filename="receipt-{name}.json"'},
        )

    async def batches(self, request: web.Request, scope: Scope) -> web.Response:
        """Batches and how long the oldest has waited."""
        archive, num_rows = self._sources.batches, self._config.num_requests
        found = await self._sources.reader.call(
            lambda: archive.newest(scope.account_id, max_batches=num_rows)
        )
        counts = await self._sources.reader.call(lambda: archive.counts([batch.id for batch in found]))
        waiting = [batch.created_at_us for batch in found if batch.is_open and counts[batch.id].queued]
        age_s = (scope.now_us - min(waiting)) / 1e6 if waiting else 0.0
        return self._page(
            request,
            scope,
            "batches.html",
            batches=found,
            counts=counts,
            age_s=age_s,
            num_waiting=len(waiting),
        )

    async def replicas(self, request: web.Request, scope: Scope) -> web.Response:
        """Health, load and hit rate; for operators."""
        if not scope.is_operator:
            return self._page(
                request, scope, "error.html", HTTPStatus.FORBIDDEN, message="This page is for operators."
            )
        num = self._config.num_replica_requests
        shares = await self._sources.reader.read(lambda connection: views.replica_shares(connection, num))
        most = max((each.num_in_flight for each in self._sources.table.replicas), default=0)
        return self._page(
            request,
            scope,
            "replicas.html",
            replicas=self._sources.table.replicas,
            num_waiting=self._sources.table.num_waiting,
            most_in_flight=max(most, 1),
            shares=shares,
            num_looked_at=sum(each["num_requests"] for each in shares.values()),
        )

    async def savings(self, request: web.Request, scope: Scope) -> web.Response:
        """The same usage on other price lists."""
        sources = self._sources

        def read(connection: Connection) -> views.View:
            return views.saved(connection, scope, sources.price_lists, sources.currency)

        view = await sources.reader.read(read)
        return self._page(
            request, scope, "savings.html", example=published_case(), assumptions=ASSUMPTIONS, **view
        )

    async def unknown(self, request: web.Request, scope: Scope) -> web.Response:
        """For addresses below the dashboard that no page has."""
        return self._page(
            request, scope, "error.html", HTTPStatus.NOT_FOUND, message="There is no such page."
        )

    # -- what all pages share ------------------------------------------------------------------------------

    def _signed_in(self, handler: _Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
        """The handler for a reader who is signed in; others are asked to, and refusals become pages."""

        async def handle(request: web.Request) -> web.Response:
            try:
                principal = await self._principal(request)
                if principal is None:
                    wanted = quote(request.path_qs, safe="")
                    return _redirect(f"{_SIGN_IN}?next={wanted}")
                scope = scope_of(principal, request.query, time.time_ns() // 1_000)
                return await handler(request, scope)
            except Refusal as refusal:
                return self._refused(refusal)

        return handle

    def _refused(self, refusal: Refusal) -> web.Response:
        return self._pages.page(
            "refused.html", refusal.reason.status, title="Not now", message=refusal.message, home=_HOME
        )

    async def _principal(self, request: web.Request) -> Principal | None:
        session = self._sessions.session(request.cookies)
        if session is None:
            return None
        principal = await self._authenticator.recognize(session.token_hash)
        if principal is None or ANALYTICS_PERMISSION not in principal.permissions:
            return None
        session_id = session.id
        is_over = await self._sources.reader.read(lambda connection: is_signed_out(connection, session_id))
        return None if is_over else principal

    def _page(
        self,
        request: web.Request,
        scope: Scope,
        template: str,
        status: HTTPStatus = HTTPStatus.OK,
        **view: object,
    ) -> web.Response:
        form_token = self._sessions.form_token(request.cookies)
        response = self._pages.page(
            template, status, scope=scope, path=request.path, ranges=RANGES, form_token=form_token, **view
        )
        self._sessions.set_form_token(response, form_token)
        return response

    def _sign_in_page(
        self, request: web.Request, problem: str = "", status: HTTPStatus = HTTPStatus.OK
    ) -> web.Response:
        form_token = self._sessions.form_token(request.cookies)
        wanted = _local(request.query.get("next", ""))
        response = self._pages.page(
            "sign_in.html", status, problem=problem, form_token=form_token, wanted=wanted
        )
        self._sessions.set_form_token(response, form_token)
        return response


def _redirect(path: str) -> web.Response:
    return web.Response(status=HTTPStatus.SEE_OTHER, headers={"location": path})


def _local(path: str) -> str:
    """``path`` when it is one of the dashboard's own, else its first page."""
    is_own = path == _HOME or path.startswith(("/dashboard/", "/dashboard?"))
    return path if is_own and path.isprintable() and "\\" not in path else _HOME
