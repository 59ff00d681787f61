"""What the dashboard's pages are made of: sessions, scopes, formats."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from billing.accounts import ALL_PERMISSIONS, PERMISSIONS, Principal
from billing.analytics import WIDTHS_US
from billing.periods import MICROS_PER_DAY
from gateway.dashboard import formats
from gateway.dashboard.routes import _local
from gateway.dashboard.scope import RANGES, scope_of
from gateway.dashboard.session import FORM_COOKIE, SESSION_COOKIE, Sessions
from tests.support.ledger import ACCOUNT, NOON_US, OTHER_ACCOUNT

CUSTOMER = Principal(ACCOUNT, "token", frozenset(PERMISSIONS))
OPERATOR = Principal(ACCOUNT, "token", frozenset(ALL_PERMISSIONS))
HASH = bytes(range(32))


def sessions(ttl_s: int = 60, *, secret: str = "secret", is_secure: bool = False) -> Sessions:
    return Sessions(secret, ttl_s=ttl_s, is_secure=is_secure)


def cookie_of(made: Sessions) -> str:
    response = web.Response()
    made.begin(response, HASH)
    return response.cookies[SESSION_COOKIE].value


def token_hash_of(made: Sessions, cookie: str) -> bytes:
    found = made.session({SESSION_COOKIE: cookie})
    assert found is not None
    return found.token_hash


class TestSessions:
    def test_a_session_holds_the_hash(self) -> None:
        assert token_hash_of(sessions(), cookie_of(sessions())) == HASH

    def test_every_session_has_its_own_id(self) -> None:
        found = [sessions().session({SESSION_COOKIE: cookie_of(sessions())}) for _ in range(2)]
        assert found[0] is not None
        assert found[1] is not None
        assert found[0].id != found[1].id

    @pytest.mark.parametrize("cookie", ["", "x", "a.b.c"])
    def test_anything_else_is_nobody(self, cookie: str) -> None:
        assert sessions().session({SESSION_COOKIE: cookie}) is None
        assert sessions().session({}) is None

    def test_a_changed_cookie_or_another_secret_is_nobody(self) -> None:
        cookie = cookie_of(sessions())
        assert sessions().session({SESSION_COOKIE: "A" + cookie[1:]}) is None
        assert sessions(secret="another").session({SESSION_COOKIE: cookie}) is None

    def test_it_expires(self) -> None:
        cookie = cookie_of(sessions())
        assert sessions(ttl_s=-1).session({SESSION_COOKIE: cookie}) is None

    def test_a_form_value_is_no_session(self) -> None:
        assert sessions().session({SESSION_COOKIE: sessions().form_token({})}) is None

    @pytest.mark.parametrize("is_secure", [True, False])
    def test_the_cookie_keeps_to_itself(self, is_secure: bool) -> None:
        response = web.Response()
        sessions(is_secure=is_secure).begin(response, HASH)
        cookie = response.cookies[SESSION_COOKIE]
        assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "Strict", "/dashboard")
        assert bool(cookie["secure"]) is is_secure

    @pytest.mark.parametrize(
        ("headers", "is_own"),
        [
            ({}, True),
            ({"sec-fetch-site": "same-origin", "origin": "http://here"}, True),
            ({"sec-fetch-site": "cross-site"}, False),
            ({"sec-fetch-site": "same-site"}, False),
            ({"origin": "http://elsewhere"}, False),
        ],
    )
    def test_only_our_own_forms_are_taken(self, headers: dict[str, str], is_own: bool) -> None:
        made = sessions()
        value = made.form_token({})
        request = make_mocked_request(
            "POST", "/", headers={"host": "here", "cookie": f"{FORM_COOKIE}={value}", **headers}
        )
        assert made.is_own_form(request, value) is is_own
        assert not made.is_own_form(request, made.form_token({}))
        assert not made.is_own_form(request, "")

    def test_a_form_value_that_nobody_signed_is_refused(self) -> None:
        request = make_mocked_request("POST", "/", headers={"cookie": f"{FORM_COOKIE}=mine"})
        assert not sessions().is_own_form(request, "mine")

    def test_a_page_keeps_the_value_that_its_browser_has(self) -> None:
        value = sessions().form_token({})
        assert sessions().form_token({FORM_COOKIE: value}) == value
        assert sessions().form_token({FORM_COOKIE: "forged"}) != "forged"


class TestScope:
    def test_a_customer_sees_its_own_account_only(self) -> None:
        assert scope_of(CUSTOMER, {"account": OTHER_ACCOUNT}, NOON_US).wanted.account_id == ACCOUNT
        assert scope_of(CUSTOMER, {"account": "all"}, NOON_US).wanted.account_id == ACCOUNT

    def test_an_operator_sees_all_or_one(self) -> None:
        assert scope_of(OPERATOR, {}, NOON_US).wanted.account_id is None
        assert scope_of(OPERATOR, {"account": OTHER_ACCOUNT}, NOON_US).wanted.account_id == OTHER_ACCOUNT

    def test_nonsense_counts_as_not_there(self) -> None:
        scope = scope_of(CUSTOMER, {"range": "9y", "status": "fine", "model": "a\x00b"}, NOON_US)
        assert (scope.range_name, scope.filters["status"], scope.filters["model"]) == ("7d", "", "ab")

    @pytest.mark.parametrize("name", RANGES)
    def test_a_range_is_whole_buckets_up_to_now(self, name: str) -> None:
        scope = scope_of(CUSTOMER, {"range": name}, NOON_US + 12_345)
        starts, width = scope.starts_us, WIDTHS_US[scope.grain]
        assert len(starts) * width == RANGES[name][1]
        assert starts[-1] <= NOON_US + 12_345 < starts[-1] + width
        assert starts[0] % width == 0
        assert RANGES[name][1] >= MICROS_PER_DAY

    def test_an_address_says_the_same_again(self) -> None:
        scope = scope_of(OPERATOR, {"range": "30d", "session": "a b"}, NOON_US)
        assert scope.query(model="m") == "?range=30d&model=m&session=a+b&account=all"


@pytest.mark.parametrize(
    ("nanos", "text"),
    [
        (0, "$0.00"),
        (1, "<$0.000001"),
        (499, "<$0.000001"),
        (1_000, "$0.000001"),
        (350_000, "$0.000350"),
        (12_345_678, "$0.0123"),
        (999_999_999, "$1.0000"),
        (1_000_000_000, "$1.00"),
        (1_234_567_890_000, "$1,234.57"),
        (-5_000_000_000, "-$5.00"),
    ],
)
def test_money(nanos: int, text: str) -> None:
    assert formats.money(nanos, "USD") == text
    assert formats.money(nanos, "CHF") == text.replace("$", "CHF ")


def test_exact_money() -> None:
    assert formats.exact_money(648, "USD") == "$0.000000648"
    assert formats.exact_money(-1_234_567_890_123, "CHF") == "-CHF 1,234.567890123"


def test_other_formats() -> None:
    assert (formats.speed(24.46), formats.speed(8_768.2)) == ("24.5\xa0tok/s", "8,768\xa0tok/s")
    assert formats.milliseconds(None) == formats.speed(None) == formats.moment(None) == "–"
    assert (formats.milliseconds(340.4), formats.milliseconds(1_240.0)) == ("340\xa0ms", "1.24\xa0s")
    assert (formats.age(45), formats.age(750), formats.age(9_000), formats.age(200_000)) == (
        "45 s",
        "12 min",
        "2.5 h",
        "2.3 d",
    )
    assert formats.moment(NOON_US) == "2026-11-30 12:00:00"


@pytest.mark.parametrize(
    "path",
    ["//evil.example", "https://evil.example", "/dashboardx", "/dashboard/\\evil", "/dashboard/\n", ""],
)
def test_signing_in_leads_nowhere_else(path: str) -> None:
    assert _local(path) == "/dashboard"
    assert _local("/dashboard/usage?by=day") == "/dashboard/usage?by=day"
