"""A PostgreSQL server of the tests' own: a cluster in a directory that is gone afterwards."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from tests.support.ports import free_port

INSTALL_HINT = (
    "there are no PostgreSQL server programs (initdb, postgres) here: install them "
    "(on Debian: apt-get install postgresql), or put the directory that has them on PATH"
)
_OWNER = "ember"
_START_S = 60.0
_ORDERS_LIKE_A_DICTIONARY = ("--locale-provider=icu", "--icu-locale=en-US")
"""Not by code point, as SQLite and Python do: what relies on that must fail here, not with a customer."""


class PostgresMissingError(RuntimeError):
    """The server's programs are not installed; the message says how to come by them."""


def server_programs() -> Path:
    """The directory with ``initdb`` and ``postgres``, the newest. Raises PostgresMissingError."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=_version_in)
    on_path = shutil.which("postgres")
    candidates = [*([Path(on_path).resolve()] if on_path else []), *reversed(found)]
    for candidate in candidates:
        if (candidate.parent / "initdb").exists():
            return candidate.parent
    raise PostgresMissingError(INSTALL_HINT)


class PostgresServer:
    """:meth:`start` makes the cluster and starts it on a free port of the loopback address."""

    def __init__(self, *, is_flushing: bool = False) -> None:
        """``is_flushing``: whether commits wait for the disk, which tests can do without. Raises
        PostgresMissingError.
        """
        self._programs = server_programs()
        self._is_flushing = is_flushing
        self._home = Path(tempfile.mkdtemp(prefix="embergate-postgres-"))
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._user = _unprivileged()

    @property
    def log_path(self) -> Path:
        return self._home / "log"

    def url(self, database: str) -> str:
        """As ``billing.database_url`` has it."""
        return f"postgresql+psycopg://{_OWNER}@127.0.0.1:{self._port}/{database}"

    def start(self) -> None:
        """Make the cluster where there is none yet, start the server, return when it answers."""
        if self._user:
            shutil.chown(self._home, self._user["user"], self._user["group"])
        if not (self._home / "data").exists():
            self._run("initdb", "--auth=trust", f"--username={_OWNER}", "--encoding=UTF8", "--no-sync",
                      "--locale=C", *(_ORDERS_LIKE_A_DICTIONARY if self._major >= 15 else ()),
                      "-D", str(self._home / "data"))  # fmt: skip
        flush = "on" if self._is_flushing else "off"
        settings = {
            "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "max_connections": "200",
            "shared_buffers": "64MB", "fsync": flush, "synchronous_commit": flush, "full_page_writes": flush,
        }  # fmt: skip
        flags = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._home / "data", "-p", str(self._port), *flags],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self._home, **self._user,
            )  # fmt: skip
        self._wait_until_it_answers()

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End the server: SIGINT ends transactions cleanly, SIGQUIT is as a crash."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None

    def remove(self) -> None:
        """Stop it and delete everything."""
        self.stop()
        shutil.rmtree(self._home, ignore_errors=True)

    def create(self, database: str, template: str = "template0") -> str:
        """A new database, as a copy of another that nobody is connected to; returns its URL."""
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY FILE_COPY" if self._major >= 15 else
                            "CREATE DATABASE {} TEMPLATE {}")  # fmt: skip
        self._do(statement.format(sql.Identifier(database), sql.Identifier(template)))
        return self.url(database)

    def drop(self, database: str) -> None:
        """Delete a database, whoever is connected to it."""
        self._do(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(database)))

    def _do(self, statement: sql.Composed) -> None:
        with psycopg.connect(self._admin_url, autocommit=True) as connection:
            connection.execute(statement)

    @property
    def _admin_url(self) -> str:
        return self.url("postgres").replace("+psycopg", "")

    @property
    def _major(self) -> int:
        text = subprocess.run([self._programs / "postgres", "-V"], capture_output=True, text=True, check=True)
        match = re.search(r"(\d+)", text.stdout)
        assert match is not None, text.stdout
        return int(match[1])

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._programs / program, *arguments], capture_output=True, text=True, cwd=self._home,
            check=False, **self._user,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr or done.stdout}")

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                psycopg.connect(self._admin_url).close()
                return
            except psycopg.OperationalError as error:
                is_dead = self._process is None or self._process.poll() is not None
                if is_dead or time.monotonic() > deadline:
                    raise RuntimeError(f"no PostgreSQL: {self.log_path.read_text()[-2_000:]}") from error
                time.sleep(0.05)


def _unprivileged() -> dict[str, Any]:
    """Root may not run a server; arguments for ``Popen`` that make it somebody else."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        groups: Sequence[int] = ()
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}
    raise PostgresMissingError("the tests run as root, and there is no user postgres or nobody for a server")


def _version_in(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", path.parent.parent.name))
