"""A real Chromium, driven by its own driver; tests that need one are skipped where it is not installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
MISSING = (
    ""
    if CHROMIUM and DRIVER
    else "Chromium and its driver are not installed (Debian: chromium chromium-driver)"
)

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)
_MAX_PICTURE_HEIGHT = 2_200


@contextmanager
def browser(
    profile: Path, *, width: int = 1280, height: int = 900, is_dark: bool = False
) -> Iterator[Chrome]:
    """A fresh browser with an empty profile; ended afterwards."""
    assert CHROMIUM is not None
    assert DRIVER is not None
    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    try:
        set_view(driver, width=width, height=height, is_dark=is_dark)
        yield driver
    finally:
        driver.quit()


def set_view(driver: Chrome, *, width: int, height: int, is_dark: bool = False) -> None:
    """Give the page exactly this many pixels, whatever a window's least width is, and a colour scheme."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def full_page(driver: Chrome, path: Path, *, width: int, is_dark: bool = False) -> None:
    """A picture of the page, the first ``_MAX_PICTURE_HEIGHT`` pixels of it."""
    whole = driver.execute_script("return document.documentElement.scrollHeight")
    height = min(int(whole), _MAX_PICTURE_HEIGHT)
    set_view(driver, width=width, height=height, is_dark=is_dark)
    path.parent.mkdir(parents=True, exist_ok=True)
    driver.save_screenshot(str(path))
