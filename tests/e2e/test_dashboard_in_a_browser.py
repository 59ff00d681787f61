"""The dashboard in a real Chromium: sign in, filter, drill down, and every number compared with the API's.

``EMBERGATE_SCREENSHOTS=docs/images`` keeps pictures of the pages; without it they are only taken.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from gateway.dashboard import formats
from tests.support import browser as chromium
from tests.support import dashboard_books
from tests.support.fake_replica import FakeReplica
from tests.support.gateway_harness import ACCOUNT, TOKEN, Harness, prepare_data_dir

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(bool(chromium.MISSING), reason=chromium.MISSING),
]

WIDE, NARROW = 1280, 390
_WAIT_S = 10
_CUT = """
return [...document.querySelectorAll("nav, .tabs, .scroll:not(details *), .tile dd")]
    .filter(each => each.offsetParent && each.scrollWidth > each.clientWidth + 1)
    .map(each => `${each.tagName} ${each.ariaLabel ?? each.id}`)
"""


class Pages:
    """What a test does with the browser, and the API beside it."""

    def __init__(self, driver: Chrome, base: str, pictures: Path) -> None:
        self.driver = driver
        self.base = base
        self._pictures = pictures

    def open(self, path: str) -> None:
        self.driver.get(self.base + path)

    def sign_in(self, token: str) -> None:
        self.driver.find_element(By.ID, "token").send_keys(token, Keys.ENTER)
        self.wait_for("#content")

    def wait_for(self, selector: str) -> None:
        WebDriverWait(self.driver, _WAIT_S).until(
            lambda driver: driver.find_elements(By.CSS_SELECTOR, selector)
        )

    def text(self, selector: str) -> str:
        return str(self.driver.find_element(By.CSS_SELECTOR, selector).text)

    def rows(self, table: str) -> list[list[str]]:
        """The cells of a table's body as they are read."""
        script = (
            "return [...document.querySelectorAll(arguments[0] + ' tbody tr')]"
            ".map(row => [...row.cells].map(cell => cell.innerText.trim()))"
        )
        found: list[list[str]] = self.driver.execute_script(script, f"#{table}")
        return found

    def picture(self, name: str, *, width: int = WIDE, is_dark: bool = False) -> None:
        """Also checks that nothing sticks out sideways and that no rule of the page was broken."""
        chromium.set_view(self.driver, width=width, height=900, is_dark=is_dark)
        time.sleep(0.3)
        sizes = self.driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        cut = self.driver.execute_script(_CUT)
        assert cut == [], f"{name}: only a sideways scroll shows all of {cut}"
        assert sizes[0] <= sizes[1] == width, f"{name} is {sizes[0]} wide on a screen of {sizes[1]}"
        chromium.full_page(self.driver, self._pictures / f"{name}.png", width=width, is_dark=is_dark)
        chromium.set_view(self.driver, width=WIDE, height=900)
        problems = [
            entry for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
        ]
        assert problems == []

    def api(self, path: str = "", **parameters: str) -> Any:
        """The usage API's answer for the same period as the page's."""
        since = self.driver.find_element(By.ID, "content").get_attribute("data-since")
        query = urlencode({"since": since} | parameters)
        url = f"{self.base}/client/v4/accounts/{ACCOUNT}/ai/usage{path}?{query}"
        request = urllib.request.Request(url, headers={"authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Harness]:
    data_dir = tmp_path / "data"
    prepare_data_dir(data_dir)
    billing = dashboard_books.fill(data_dir, time.time_ns() // 1_000)
    replicas = [FakeReplica("replica-0"), FakeReplica("replica-1")]
    for replica in replicas:
        await replica.start()
    harness = Harness(data_dir, replicas, billing=billing)
    await harness.start()
    yield harness
    await harness.stop()
    for replica in replicas:
        await replica.stop()


def money(nanos: int) -> str:
    return formats.money(nanos, "USD")


def shown(text: str) -> str:
    return text.replace("\xa0", " ")


async def test_every_page(gateway: Harness, tmp_path: Path) -> None:
    kept = os.environ.get("EMBERGATE_SCREENSHOTS")
    pictures = Path(kept) if kept else tmp_path / "pictures"
    base = gateway.root("")

    def drive() -> None:
        with chromium.browser(tmp_path / "profile") as driver:
            pages = Pages(driver, base, pictures)
            signing_in(pages)
            overview(pages)
            usage(pages)
            requests(pages)
            savings(pages)
            batches(pages)
            keyboard(pages)
            signing_out(pages)
            operator(pages)

    await asyncio.to_thread(drive)


def signing_in(pages: Pages) -> None:
    pages.open("/dashboard/usage?range=30d")
    pages.picture("dashboard-sign-in")
    pages.driver.find_element(By.ID, "token").send_keys("not a token at all", Keys.ENTER)
    pages.wait_for("[role=alert]")
    assert pages.text("[role=alert]") == "This API token is not valid."
    pages.driver.get_log("browser")  # the refusal itself
    pages.open("/dashboard/usage?range=30d")
    pages.sign_in(TOKEN)
    assert pages.driver.current_url.endswith("/dashboard/usage?range=30d")
    assert pages.driver.execute_script("return document.cookie") == ""


def overview(pages: Pages) -> None:
    pages.open("/dashboard?range=30d")
    pages.wait_for("html[data-charts=drawn]")
    assert len(pages.driver.find_elements(By.CSS_SELECTOR, ".plot canvas")) == 4
    [total] = pages.api(group_by="none")["result"]
    compare_tiles(pages, total)
    sessions = pages.api(group_by="session", limit="8")["result"]
    found = [element.text for element in pages.driver.find_elements(By.CSS_SELECTOR, "#sessions strong")]
    assert found == [money(row["amount_nanos"]) for row in sessions]
    days = pages.api(group_by="day")["result"]
    pages.driver.find_element(By.CSS_SELECTOR, ".chart summary").click()
    script = (
        "return [...document.querySelector('.chart tbody').rows]"
        ".map(row => [...row.cells].map(cell => cell.innerText))"
    )
    assert pages.driver.execute_script(script) == [
        [row["day"], f"{row['undiscounted_nanos'] / 1e9:,.6f}", f"{row['amount_nanos'] / 1e9:,.6f}"]
        for row in days
    ]
    pages.driver.find_element(By.CSS_SELECTOR, ".chart summary").click()
    pages.picture("dashboard-overview")
    pages.picture("dashboard-overview-phone", width=NARROW)
    pages.picture("dashboard-overview-dark", is_dark=True)
    Select(pages.driver.find_element(By.NAME, "model")).select_by_visible_text(dashboard_books.SECOND_MODEL)
    WebDriverWait(pages.driver, _WAIT_S).until(lambda driver: "model=%40cf" in driver.current_url)
    pages.wait_for("#charged")
    [total] = pages.api(group_by="none", model=dashboard_books.SECOND_MODEL)["result"]
    compare_tiles(pages, total)


def compare_tiles(pages: Pages, total: dict[str, Any]) -> None:
    assert pages.text("#charged") == money(total["amount_nanos"])
    assert pages.text("#saved") == money(total["discount_nanos"])
    assert pages.text("#cached-share") == f"{total['cached_share']:.1%}"
    assert pages.text("#output-tokens") == f"{total['completion_tokens']:,}"
    assert shown(pages.text("#ttft")) == shown(formats.milliseconds(total["ttft_ms_p50"]))
    assert shown(pages.text("#speed")) == shown(formats.speed(total["tokens_per_second_p50"]))


def usage(pages: Pages) -> None:
    for by in ("model", "token", "session", "surface", "status"):
        pages.open(f"/dashboard/usage?range=30d&by={by}")
        rows = pages.api(group_by=by, limit="200")["result"]
        assert [cells[1:] for cells in pages.rows("usage")] == [
            [
                f"{row['num_requests']:,}",
                f"{row['prompt_tokens'] - row['cached_prompt_tokens']:,}",
                f"{row['cached_prompt_tokens']:,}",
                f"{row['cached_share']:.1%}",
                f"{row['completion_tokens']:,}",
                money(row["amount_nanos"]),
                money(row["discount_nanos"]),
            ]
            for row in rows
        ]
    pages.open("/dashboard/usage?range=30d&by=session")
    pages.picture("dashboard-usage")
    pages.picture("dashboard-usage-phone", width=NARROW)


def requests(pages: Pages) -> None:
    """From a session to its requests to one of them and its receipt."""
    pages.driver.find_element(By.CSS_SELECTOR, "#usage tbody a").click()
    pages.wait_for("#requests")
    session = Select(pages.driver.find_element(By.NAME, "range")).first_selected_option.text
    assert session == "Last 30 days"
    name = pages.driver.find_element(By.NAME, "session").get_attribute("value")
    assert name
    rows = pages.api(group_by="request", session=name, limit="50")["result"]
    found = pages.rows("requests")
    assert [(cells[5], cells[6], cells[7], cells[9]) for cells in found] == [
        (
            f"{row['prompt_tokens']:,}",
            f"{row['cached_prompt_tokens']:,}",
            f"{row['completion_tokens']:,}",
            money(row["amount_nanos"]),
        )
        for row in rows
    ]
    pages.driver.find_element(By.CSS_SELECTOR, "#requests tbody a").click()
    pages.wait_for("#lines")
    request_id = pages.text("#request-id")
    assert request_id == rows[0]["request_id"]
    receipt = pages.api(f"/{request_id}")["result"]["receipt"]
    assert pages.text("#cost") == money(receipt["amount_nanos"])
    assert pages.text("#neurons") == f"{receipt['neurons_e4'] / 10_000:.4f}"
    assert [(cells[1], cells[3]) for cells in pages.rows("lines")] == [
        (f"{line['num_tokens']:,}", formats.exact_money(line["amount_nanos"], "USD"))
        for line in receipt["lines"]
    ]
    pages.picture("dashboard-request")
    pages.picture("dashboard-request-phone", width=NARROW)
    pages.open("/dashboard/requests?range=30d")
    pages.picture("dashboard-requests")
    pages.picture("dashboard-requests-phone", width=NARROW)
    newest = pages.rows("requests")
    pages.driver.find_element(By.CSS_SELECTOR, "a[rel=next]").click()
    pages.wait_for("#requests")
    older = pages.rows("requests")
    assert len(newest) == len(older) == 50
    assert min(cells[0] for cells in newest) >= max(cells[0] for cells in older)


def savings(pages: Pages) -> None:
    pages.open("/dashboard/savings?range=30d")
    totals = [
        pages.api(group_by="none", status=status)["result"][0] for status in ("ok", "client_disconnected")
    ]
    assert pages.text("#charged") == money(sum(each["amount_nanos"] for each in totals))
    assert pages.text("#undiscounted") == money(sum(each["undiscounted_nanos"] for each in totals))
    assert pages.text("#saved") == money(sum(each["discount_nanos"] for each in totals))
    assert "$2,399,145.00" in pages.rows("example")[0]
    pages.picture("dashboard-savings")
    pages.picture("dashboard-savings-phone", width=NARROW)


def batches(pages: Pages) -> None:
    pages.open("/dashboard/batches")
    assert pages.text("#waiting") == "0"
    pages.picture("dashboard-batches")


def keyboard(pages: Pages) -> None:
    """Everything can be reached with the tab key, beginning with the way past the navigation."""
    pages.open("/dashboard?range=30d")
    reached = []
    for _ in range(60):
        pages.driver.switch_to.active_element.send_keys(Keys.TAB)
        element = pages.driver.switch_to.active_element
        reached.append(element.get_attribute("name") or element.get_attribute("href") or element.text)
    assert reached[0].endswith("#content")
    for wanted in ("account", "range", "model", "token", "status", "session"):
        assert wanted in reached or wanted == "account"
    assert any(name.endswith("/dashboard/savings?range=30d") for name in reached)


def signing_out(pages: Pages) -> None:
    pages.driver.find_element(By.CSS_SELECTOR, ".sign-out button").click()
    pages.wait_for("#token")
    pages.open("/dashboard")
    pages.wait_for("#token")


def operator(pages: Pages) -> None:
    pages.sign_in(dashboard_books.OPERATOR_TOKEN)
    pages.open("/dashboard?range=30d")
    everyone = pages.text("#charged")
    Select(pages.driver.find_element(By.NAME, "account")).select_by_value(ACCOUNT)
    WebDriverWait(pages.driver, _WAIT_S).until(lambda driver: ACCOUNT in driver.current_url)
    pages.wait_for("#charged")
    [total] = pages.api(group_by="none")["result"]
    assert pages.text("#charged") == money(total["amount_nanos"]) != everyone
    pages.open("/dashboard/replicas")
    assert [cells[:2] for cells in pages.rows("replicas")] == [["replica-0", "ready"], ["replica-1", "ready"]]
    pages.picture("dashboard-replicas")
