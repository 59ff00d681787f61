"""What most commands begin with: the settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import click

from embergate.config_file import Settings, load_settings

P = ParamSpec("P")
R = TypeVar("R")


def with_settings(command: Callable[Concatenate[Settings, P], R]) -> Callable[P, R]:
    """Give a command the settings as its first argument."""

    @click.pass_context
    def wrapped(context: click.Context, /, *args: P.args, **kwargs: P.kwargs) -> R:
        settings = load_settings(context.find_root().obj, os.environ, Path.cwd())
        return context.invoke(command, settings, *args, **kwargs)

    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    return wrapped
