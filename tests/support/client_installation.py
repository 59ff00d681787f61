"""A gateway for real clients: two replicas of the embedded model, one for embeddings, a small Kimi."""

from __future__ import annotations

import copy
import json
import sqlite3
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.support.installation import Installation
from tests.support.ports import free_port

TINY = "kimi-k2.5-tiny"
SLOW_ACCOUNT = "510e" * 8
SLOW_WAIT_S = 2
"""An account that gets one request in so many seconds."""

_READY_TIMEOUT_S = 120.0


class ClientInstallation(Installation):
    """What the tests of all clients share."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, num_embedding_replicas=1)
        self._tiny_port = free_port()
        self._tiny: subprocess.Popen[bytes] | None = None
        self.slow_token = ""
        url = f"http://127.0.0.1:{self._tiny_port}"
        self.config["replicas"]["addresses"] = [{"id": "tiny-0", "url": url, "models": [TINY]}]
        self.config["gateway"]["limits"]["accounts"] = {
            SLOW_ACCOUNT: {"requests_per_minute": 60 // SLOW_WAIT_S, "burst_requests": 1}
        }
        (home / "config.yaml").write_text(yaml.safe_dump(self.config))

    def up(self) -> None:
        """Start everything; also what ``embergate up`` does not."""
        super().up()
        self._start_tiny()
        account = ["accounts", "create", "slow", "--id", SLOW_ACCOUNT]
        self.run_json(*account)
        self.slow_token = self.run_json("tokens", "create", "--account", SLOW_ACCOUNT)["token"]
        self._wait_for_tiny()

    def down(self) -> None:
        if self._tiny is not None:
            self._tiny.terminate()
            self._tiny.wait(30)
        super().down()

    def environment_of(self, *, slow: bool = False) -> dict[str, str]:
        """The variables that client programs read."""
        return {
            "EMBERGATE_URL": self.url,
            "EMBERGATE_ACCOUNT_ID": SLOW_ACCOUNT if slow else self.account.account_id,
            "EMBERGATE_API_TOKEN": self.slow_token if slow else self.account.api_token,
        }

    def records(self, session: str, count: int, timeout_s: float = 15.0) -> list[dict[str, Any]]:
        """The usage records of a session, once there are ``count``, oldest first."""
        deadline = time.monotonic() + timeout_s
        query = "SELECT * FROM usage_records WHERE session = ? ORDER BY started_at_us"
        while True:
            database = sqlite3.connect(f"file:{self.data_dir / 'ledger.db'}?mode=ro", uri=True)
            try:
                database.row_factory = sqlite3.Row
                rows = [dict(row) for row in database.execute(query, (session,))]
            finally:
                database.close()
            if len(rows) >= count or time.monotonic() > deadline:
                assert len(rows) == count, f"{len(rows)} records of {session}"
                return rows
            time.sleep(0.1)

    def num_running(self) -> int:
        """Requests that replicas have in flight, as the gateway counts them."""
        with urllib.request.urlopen(f"{self.url}/ready", timeout=10) as response:
            replicas = json.load(response)["replicas"]
        return sum(replica["num_in_flight"] for replica in replicas.values())

    def _start_tiny(self) -> None:
        config = copy.deepcopy(self.config)
        config["data_dir"] = str(self.data_dir)
        config["gateway"]["port"] = free_port()
        config["replicas"] |= {"model": TINY, "count": 1, "base_port": self._tiny_port, "addresses": []}
        path = self.home / "tiny.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "embergate", "--config", str(path), "serve", "replica"]
        self.layout.logs_dir.mkdir(parents=True, exist_ok=True)
        with (self.layout.logs_dir / "tiny-0.log").open("wb") as log:
            self._tiny = subprocess.Popen(
                command,
                cwd=self.home,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _wait_for_tiny(self) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=10) as response:
                if json.load(response)["replicas"]["tiny-0"]["health"] == "ready":
                    return
            time.sleep(0.25)
        raise AssertionError(f"the small Kimi is not ready\n{self.last_log_lines()}")
