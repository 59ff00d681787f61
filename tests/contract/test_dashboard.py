"""The dashboard over plain HTTP: who gets in, what a post needs, what pages say and allow."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from billing.accounts import AccountDirectory
from billing.usage import UsageRecord
from gateway.config import DashboardConfig
from gateway.dashboard.session import SESSION_COOKIE
from tests.contract.test_usage_api import BLIND_TOKEN, OPERATOR_TOKEN, Start, books
from tests.support.gateway_harness import OTHER_TOKEN, TOKEN, Harness, gateway_config, open_books

pytestmark = pytest.mark.each_store

__all__ = ["books"]  # the fixture

PAGES = ("", "/usage", "/requests", "/requests/request-000003", "/batches", "/savings")


class Visitor:
    """A browser without a screen: keeps cookies, follows nothing by itself."""

    def __init__(self, gateway: Harness) -> None:
        self.base = gateway.root("")
        self.session = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))

    async def get(self, path: str) -> tuple[int, Any, str]:
        async with self.session.get(self.base + path, allow_redirects=False) as response:
            return response.status, response.headers, (await response.read()).decode()

    async def post(self, path: str, fields: dict[str, str], **headers: str) -> tuple[int, Any, str]:
        url = self.base + path
        async with self.session.post(url, data=fields, headers=headers, allow_redirects=False) as response:
            return response.status, response.headers, await response.text()

    async def form_token(self, path: str = "/dashboard/sign-in") -> str:
        _, _, text = await self.get(path)
        found = re.search(r'name="form_token" value="([^"]+)"', text)
        assert found is not None
        return found.group(1)

    async def sign_in(self, token: str, **fields: str) -> tuple[int, Any, str]:
        form_token = await self.form_token()
        return await self.post("/dashboard/sign-in", {"form_token": form_token, "token": token} | fields)


@pytest.fixture
async def visitor(books: list[UsageRecord], gateway: Harness) -> Any:
    made = Visitor(gateway)
    yield made
    await made.session.close()


async def test_pages_ask_who_is_there(visitor: Visitor) -> None:
    for page in PAGES:
        status, headers, _ = await visitor.get(f"/dashboard{page}?range=30d")
        assert status == 303
        assert headers["location"].startswith("/dashboard/sign-in?next=%2Fdashboard")
    status, headers, text = await visitor.get("/dashboard/sign-in?next=/dashboard/usage")
    assert status == 200
    assert 'value="/dashboard/usage"' in text


async def test_a_customer_signs_in_and_sees_every_page(visitor: Visitor) -> None:
    status, headers, _ = await visitor.sign_in(TOKEN, next="/dashboard/usage")
    assert (status, headers["location"]) == (303, "/dashboard/usage")
    assert "HttpOnly" in headers["set-cookie"]
    assert "SameSite=Strict" in headers["set-cookie"]
    for page in PAGES:
        status, headers, text = await visitor.get(f"/dashboard{page}?range=365d")
        assert status == 200, page
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["cache-control"] == "no-store"
        assert "<script>" not in text
        assert " style=" not in text
        assert "onclick" not in text
    status, _, text = await visitor.get("/dashboard/replicas")
    assert status == 403
    assert "for operators" in text
    status, headers, _ = await visitor.get("/dashboard/sign-in")
    assert (status, headers["location"]) == (303, "/dashboard")


async def test_numbers_are_those_of_the_books(visitor: Visitor, books: list[UsageRecord]) -> None:
    await visitor.sign_in(TOKEN)
    _, _, text = await visitor.get("/dashboard?range=365d")
    assert '<dd id="cached-share" data-exact="0.8">80.0%</dd>' in text
    assert "60 requests" in text
    _, _, text = await visitor.get("/dashboard/requests/request-000003")
    assert '<dd id="cost" data-exact="350000">$0.000350</dd>' in text
    assert re.findall(r'data-label="Amount">(?:<strong>)?([^<]+)', text)[-1] == "$0.000350000"
    status, headers, receipt = await visitor.get("/dashboard/requests/request-000003/receipt")
    assert status == 200
    assert "receipt-request-000003.json" in headers["content-disposition"]
    assert '"signature"' in receipt


async def test_what_is_of_another_account_is_not_there(visitor: Visitor) -> None:
    await visitor.sign_in(OTHER_TOKEN)
    for path in ("/requests/request-000003", "/requests/request-000003/receipt"):
        status, _, text = await visitor.get(f"/dashboard{path}")
        assert status == 404
        assert "no such request" in text
    _, _, text = await visitor.get("/dashboard?range=365d&account=0123456789abcdef0123456789abcdef")
    assert "1 requests" in text


async def test_an_operator_sees_all_accounts_and_the_replicas(visitor: Visitor) -> None:
    await visitor.sign_in(OPERATOR_TOKEN)
    _, _, text = await visitor.get("/dashboard?range=365d")
    assert "61 requests" in text
    assert "All accounts" in text
    status, _, text = await visitor.get("/dashboard/replicas")
    assert status == 200
    assert text.count('<th scope="row" class="mono">replica-') == 2
    assert "80.0%" in text
    _, _, text = await visitor.get("/dashboard/requests/request-000003")
    assert "Account" in text


@pytest.mark.parametrize(
    ("token", "status", "message"),
    [("x" * 40, 401, "is not valid"), ("", 401, "is not valid"), (BLIND_TOKEN, 403, "analytics:read")],
)
async def test_tokens_that_do_not_open(visitor: Visitor, token: str, status: int, message: str) -> None:
    found, headers, text = await visitor.sign_in(token)
    assert found == status
    assert message in text
    assert "embergate_session" not in headers.get("set-cookie", "")
    assert (await visitor.get("/dashboard"))[0] == 303


async def test_posts_from_elsewhere_change_nothing(visitor: Visitor) -> None:
    form_token = await visitor.form_token()
    fields = {"form_token": form_token, "token": TOKEN}
    for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "https://evil.example"}):
        assert (await visitor.post("/dashboard/sign-in", fields, **headers))[0] == 403
    assert (await visitor.post("/dashboard/sign-in", fields | {"form_token": "forged"}))[0] == 403
    assert (await visitor.post("/dashboard/sign-in", {"token": TOKEN}))[0] == 403
    assert (await visitor.post("/dashboard/sign-in", fields))[0] == 303
    for fields in ({"form_token": "forged"}, {}):
        status, headers, text = await visitor.post("/dashboard/sign-out", fields)
        assert (status, headers["content-type"]) == (403, "text/html; charset=utf-8")
        assert "still signed in" in text
    assert (await visitor.get("/dashboard"))[0] == 200
    await visitor.post("/dashboard/sign-out", {"form_token": await visitor.form_token("/dashboard")})
    assert (await visitor.get("/dashboard"))[0] == 303


async def test_a_copied_cookie_ends_with_its_session(
    visitor: Visitor, gateway: Harness, start_gateway: Start
) -> None:
    await visitor.sign_in(TOKEN)
    [copied] = [each.value for each in visitor.session.cookie_jar if each.key == SESSION_COOKIE]
    other = Visitor(gateway)
    other.session.cookie_jar.update_cookies({SESSION_COOKIE: copied})
    assert (await other.get("/dashboard"))[0] == 200
    await visitor.post("/dashboard/sign-out", {"form_token": await visitor.form_token("/dashboard")})
    assert (await other.get("/dashboard"))[0] == 303
    await visitor.sign_in(TOKEN)  # another session of the same token is not concerned
    assert (await visitor.get("/dashboard"))[0] == 200
    await gateway.stop()
    other.base = (await start_gateway(gateway_config())).root("")
    assert (await other.get("/dashboard"))[0] == 303  # neither a restart nor another gateway forgets
    await other.session.close()


async def test_addresses_that_no_page_has(visitor: Visitor) -> None:
    for path in ("/dashboard/nope", "/dashboard/requests/a/b"):
        assert (await visitor.get(path))[0] == 303
    await visitor.sign_in(TOKEN)
    for path in ("/dashboard/nope", "/dashboard/requests/a/b"):
        status, headers, text = await visitor.get(path)
        assert (status, headers["content-type"]) == (404, "text/html; charset=utf-8")
        assert "There is no such page." in text
    status, headers, _ = await visitor.get("/dashboard/")
    assert (status, headers["location"]) == (303, "/dashboard")


async def test_signing_in_leads_only_to_own_pages(visitor: Visitor) -> None:
    _, headers, _ = await visitor.sign_in(TOKEN, next="https://evil.example/dashboard")
    assert headers["location"] == "/dashboard"


async def test_a_revoked_token_is_signed_out(visitor: Visitor, data_dir: Path) -> None:
    await visitor.sign_in(TOKEN)
    store = open_books(data_dir)
    directory = AccountDirectory(store)
    [token] = [each for each in directory.list_tokens() if each.name == "test" and each.account_id[0] == "0"]
    directory.revoke_token(token.id)
    store.close()
    await asyncio.sleep(0.3)  # how long the edge remembers a token, and some
    assert (await visitor.get("/dashboard"))[0] == 303


async def test_text_of_customers_is_text(visitor: Visitor, gateway: Harness) -> None:
    await gateway.chat(headers={"x-session-affinity": "<script>alert(1)</script>"})
    await visitor.sign_in(TOKEN)
    for _ in range(100):
        _, _, text = await visitor.get("/dashboard/requests?range=24h")
        if "alert(1)" in text:
            break
    assert "&lt;script&gt;alert(1)" in text
    assert "<script>alert" not in text
    _, _, text = await visitor.get('/dashboard?session="><img src=x>')
    assert "<img src=x>" not in text


async def test_static_files_come_from_packages_and_are_kept(visitor: Visitor) -> None:
    for name in ("uPlot.iife.js", "uPlot.min.css", "dashboard.js", "dashboard.css", "ember.svg"):
        status, headers, _ = await visitor.get(f"/dashboard/static/{name}")
        assert status == 200
        url = f"{visitor.base}/dashboard/static/{name}"
        async with visitor.session.get(url, headers={"if-none-match": headers["etag"]}) as again:
            assert again.status == 304
    assert (await visitor.get("/dashboard/static/routes.py"))[0] == 404
    assert (await visitor.get("/dashboard/static/..%2froutes.py"))[0] == 404


async def test_it_can_be_switched_off(gateway: Harness, start_gateway: Start) -> None:
    await gateway.stop()
    off = await start_gateway(gateway_config(dashboard=DashboardConfig(is_enabled=False)))
    assert (await off.get(off.root("/dashboard"))).status == 404
