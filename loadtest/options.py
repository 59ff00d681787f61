"""Options that every command has: where to ask, and as whom."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from loadtest.exchange import Endpoint

DEFAULT_MODEL = "@cf/moonshotai/kimi-k2.5"


def endpoint_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``endpoint``; what is not given comes from the environment, as ``dev.env`` sets it."""

    @click.option("--url", envvar="EMBERGATE_URL", required=True, help="Of the gateway. [EMBERGATE_URL]")
    @click.option("--account", envvar="EMBERGATE_ACCOUNT_ID", required=True, help="[EMBERGATE_ACCOUNT_ID]")
    @click.option("--token", envvar="EMBERGATE_API_TOKEN", required=True, help="[EMBERGATE_API_TOKEN]")
    @click.option("--model", envvar="EMBERGATE_MODEL", default=DEFAULT_MODEL, show_default=True)
    @functools.wraps(command)
    def wrapped(*args: Any, url: str, account: str, token: str, model: str, **kwargs: Any) -> Any:
        return command(*args, endpoint=Endpoint(url, account, token, model), **kwargs)

    return wrapped
