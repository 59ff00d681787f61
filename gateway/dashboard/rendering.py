"""Templates and static files: rendered, and answered with the headers that keep a page to itself."""

from __future__ import annotations

import hashlib
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from jinja2 import Environment, PackageLoader, StrictUndefined

from gateway.dashboard import formats

_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_OWN = Path(__file__).parent / "static"
_CHART_PACKAGE = "uplot"
_CHART_FILES = {"uPlot.iife.js", "uPlot.min.css"}


class MissingChartsError(RuntimeError):
    """The package that carries the charting library is not installed."""


class Pages:
    """Renders the templates. Immutable after construction."""

    def __init__(self, currency: str) -> None:
        self._environment = Environment(
            loader=PackageLoader("gateway.dashboard"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.filters |= {
            "money": partial(formats.money, currency=currency),
            "exact": partial(formats.exact_money, currency=currency),
            "count": formats.count,
            "share": formats.share,
            "ms": formats.milliseconds,
            "speed": formats.speed,
            "moment": formats.moment,
            "age": formats.age,
        }
        self._environment.globals["symbol"] = formats.symbol(currency)

    def page(self, template: str, status: int = 200, **view: Any) -> web.Response:
        """An HTML answer."""
        text = self._environment.get_template(template).render(**view)
        return web.Response(
            status=status, text=text, content_type="text/html", charset="utf-8", headers=_HEADERS
        )


class StaticFiles:
    """The pages' own script and style, and the charting library's from its package; in memory."""

    def __init__(self) -> None:
        """Raises MissingChartsError."""
        files = {path.name: path.read_bytes() for path in _OWN.iterdir() if path.suffix in _TYPES}
        files |= _chart_files()
        self._files = {
            name: (data, f'"{hashlib.sha256(data).hexdigest()[:16]}"') for name, data in files.items()
        }

    def answer(self, request: web.Request) -> web.Response:
        """The file that the path names, or 304 for a browser that has it."""
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound
        data, tag = self._files[name]
        headers = {"etag": tag, "cache-control": "no-cache", "x-content-type-options": "nosniff"}
        if request.headers.get("if-none-match") == tag:
            return web.Response(status=304, headers=headers)
        content_type = _TYPES[Path(name).suffix]
        return web.Response(body=data, content_type=content_type, charset="utf-8", headers=headers)


def _chart_files() -> dict[str, bytes]:
    """Found without importing the package, whose Python side is not used."""
    spec = importlib.util.find_spec(_CHART_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingChartsError("the package uplot-python is missing: run `make install`")
    folder = Path(spec.submodule_search_locations[0]) / "static"
    try:
        return {name: (folder / name).read_bytes() for name in _CHART_FILES}
    except OSError as error:
        raise MissingChartsError(f"the package uplot-python is incomplete: {error}") from error
