"""Clients as their users get them: pinned packages of npm and PyPI, installed below the data directory."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "tests" / "clients"
_INSTALL_TIMEOUT_S = 900
_MIN_NODE = 22


class ClientPackages:
    """Sets of packages, pinned below ``sources``. What is missing is installed when it is first asked for."""

    def __init__(self, sources: Path = SOURCES) -> None:
        self._sources = sources
        data_dir = Path(os.environ.get("EMBERGATE_DATA_DIR", ROOT / ".embergate")).resolve()
        self._home = data_dir / "clients"
        self._home.mkdir(parents=True, exist_ok=True)

    @property
    def npm(self) -> Path:
        """A directory with ``node_modules``."""
        return self._installed("npm", ("package.json", "package-lock.json"), _install_npm)

    @property
    def python(self) -> Path:
        """The interpreter of an environment that has the Python clients and nothing of ours."""
        return self.environment("python") / "bin" / "python"

    def environment(self, name: str) -> Path:
        """The directory of an environment that has what ``NAME/requirements.txt`` pins, and nothing else."""
        return self._installed(name, ("requirements.txt",), _install_python)

    @property
    def node(self) -> str:
        """A Node.js that is new enough: the one out of npm, or else this machine's own."""
        for path in sorted(self.npm.glob("node_modules/node-*/bin/node")):
            return str(path)
        found = shutil.which("node")
        assert found is not None, "the clients need Node.js"
        version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
        assert int(version.lstrip("v").split(".")[0]) >= _MIN_NODE, f"the clients need Node.js {_MIN_NODE}"
        return found

    @property
    def workerd(self) -> Path:
        """The Workers runtime."""
        (path,) = self.npm.glob("node_modules/@cloudflare/workerd-*/bin/workerd")
        return path

    def link(self, name: str, source: Path) -> None:
        """Install a package of ours beside the others, as ``npm install DIRECTORY`` does."""
        link = self.npm / "node_modules" / name
        link.unlink(missing_ok=True)  # one of another checkout, perhaps
        link.symlink_to(source, target_is_directory=True)

    def run_node(self, program: str, environment: dict[str, str]) -> Any:
        """Run ``programs/PROGRAM`` beside the npm packages; what it prints last must be JSON."""
        copy = self.npm / program
        copy.write_text((SOURCES / "programs" / program).read_text())
        return _run([self.node, str(copy)], environment)

    def run_python(self, program: str, environment: dict[str, str]) -> Any:
        """Run ``programs/PROGRAM`` with the Python clients; what it prints last must be JSON."""
        return _run([str(self.python), "-I", str(SOURCES / "programs" / program)], environment)

    def _installed(self, name: str, files: tuple[str, ...], install: Callable[[Path], None]) -> Path:
        """The directory of the set as it is pinned now; another pin has another directory."""
        digest = hashlib.sha256()
        for file in files:
            digest.update((self._sources / name / file).read_bytes())
        directory = self._home / f"{name}-{digest.hexdigest()[:16]}"
        stamp = directory / ".complete"
        if stamp.exists():
            return directory
        with _lock(self._home / f"{name}.lock"):
            if not stamp.exists():
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir()
                for file in files:
                    shutil.copy(self._sources / name / file, directory / file)
                install(directory)
                stamp.touch()
        return directory


def plain_environment(**variables: str) -> dict[str, str]:
    """What a program gets of this process's environment: nothing that points it to another service."""
    kept = ("PATH", "LANG", "TMPDIR")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    return environment | variables


def _install_npm(directory: Path) -> None:
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    _check(subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S))


def _install_python(directory: Path) -> None:
    pip = [str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    # The pins are complete, so that there is nothing to resolve.
    install = [*pip, "--no-deps", "-r", "requirements.txt"]
    for command in ([sys.executable, "-m", "venv", str(directory)], install):
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S
        )
        _check(done)


def _check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{done.args}: {done.stdout[-2000:]}{done.stderr[-4000:]}"


def _run(command: list[str], environment: dict[str, str]) -> Any:
    done = subprocess.run(
        command, env=plain_environment(**environment), capture_output=True, text=True, timeout=240
    )
    _check(done)
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One installation of a set at a time, whoever runs the tests."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
