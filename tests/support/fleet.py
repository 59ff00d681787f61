"""Several gateways on one database, and scripted replicas, all of them processes that can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from billing.accounts import AccountDirectory
from billing.config import BillingConfig, RateCardConfig
from billing.store import Store
from tests.support.gateway_harness import ACCOUNT, MODEL, TOKEN
from tests.support.ports import free_ports

ROOT = Path(__file__).parents[2]


class Fleet:
    """:meth:`start` starts it; :meth:`kill` takes one process by its name, :meth:`restart` brings it back."""

    def __init__(
        self,
        home: Path,
        *,
        num_gateways: int,
        num_replicas: int,
        token_delay_s: float,
        batches: dict[str, Any] | None = None,
        database_url: str = "",
        spool: dict[str, Any] | None = None,
    ) -> None:
        """``batches`` and ``spool`` are sections of the configuration; no ``batches``, no batches."""
        self.home = home
        self.database_url = database_url or f"sqlite:///{home / 'ledger.db'}"
        self.gateways = [f"gateway-{number}" for number in range(num_gateways)]
        self.replicas = [f"replica-{number}" for number in range(num_replicas)]
        self._token_delay_s = token_delay_s
        names = [*self.gateways, *self.replicas]
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in self.gateways:
            self._write_config(name, {"is_enabled": False} if batches is None else batches, spool or {})

    def url(self, gateway: str) -> str:
        """Base of the account's routes at one gateway."""
        return f"http://127.0.0.1:{self._ports[gateway]}/client/v4/accounts/{ACCOUNT}/ai"

    def root_url(self, name: str) -> str:
        """Base of all routes of one process."""
        return f"http://127.0.0.1:{self._ports[name]}"

    def health_url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}/health"

    @property
    def billing(self) -> BillingConfig:
        card = RateCardConfig(
            model=MODEL, effective_from="2026-01-01", input="0.60", output="3.00", cached_input="0.10"
        )
        return BillingConfig(database_url=self.database_url, rate_cards=[card])

    @property
    def spool_dirs(self) -> list[Path]:
        return [self.home / name / "spool" for name in self.gateways]

    def start(self) -> None:
        """Make the account and start everything."""
        store = Store.open(self.database_url)
        directory = AccountDirectory(store)
        directory.create_account("test", ACCOUNT)
        directory.import_token(ACCOUNT, TOKEN, "test")
        store.close()
        for name in (*self.replicas, *self.gateways):
            self.restart(name)

    def restart(self, name: str) -> None:
        """Start a process that does not run."""
        if name in self.replicas:
            arguments: Sequence[str] = (
                "tests.support.replica_process", name, str(self._ports[name]), str(self._token_delay_s)
            )  # fmt: skip
        else:
            config = str(self.home / name / "config.yaml")
            arguments = ("embergate", "--config", config, "serve", "gateway")
        with (self.home / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", *arguments], cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )

    def kill(self, name: str) -> None:
        """``kill -9``."""
        process = self._processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def port(self, name: str) -> int:
        return self._ports[name]

    def is_started(self, name: str) -> bool:
        """Whether it was started and not killed since."""
        return name in self._processes

    def stop(self) -> None:
        """End everything; gateways first, and cleanly."""
        for name in (*self.gateways, *self.replicas):
            if name in self._processes:
                self._processes[name].terminate()
        for process in self._processes.values():
            process.wait(30)
        self._processes.clear()

    def logs(self) -> str:
        """The ends of all logs, for messages of failed tests."""
        return "\n".join(
            f"== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-20:])
            for path in sorted(self.home.glob("*.log"))
        )

    @property
    def _environment(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("EMBERGATE_")}
        return {**inherited, "OMP_NUM_THREADS": "1"}

    def _write_config(self, name: str, batches: dict[str, Any], spool: dict[str, Any]) -> None:
        directory = self.home / name
        directory.mkdir(exist_ok=True)
        addresses = [
            {"id": replica, "url": f"http://127.0.0.1:{self._ports[replica]}"} for replica in self.replicas
        ]
        card = {"model": MODEL, "effective_from": "2026-01-01", "input": "0.60", "output": "3.00"}
        config = {
            "data_dir": ".",
            "models": [{"id": MODEL, "max_model_len": 4096}],
            "gateway": {
                "port": self._ports[name],
                "health": {"probe_interval_s": 0.2},
                "telemetry": {"access_log": False},
                "batches": batches,
            },
            "replicas": {"count": 0, "addresses": addresses},
            "billing": {
                "database_url": self.database_url,
                "rate_cards": [{**card, "cached_input": "0.10"}],
                "spool": spool,
            },
        }
        (directory / "config.yaml").write_text(yaml.safe_dump(config))
