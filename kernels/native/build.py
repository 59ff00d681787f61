"""Compiling the native ops: once per source, flags, compiler and CPU, into a cache of the user's own."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

COMPILE_TIMEOUT_S = 180.0
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
_VARIANTS = (("-march=native",), ())
"""Tried in this order: a compiler without ``native`` still gives a slower library."""


class NativeBuildError(Exception):
    """The native library cannot be built or loaded; the message is one sentence for an operator."""


class CompilerMissingError(NativeBuildError):
    """There is no C compiler."""


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/embergate/native``, by default below ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "embergate" / "native"


def build_library(cache_dir: Path) -> Path:
    """The path of the compiled library in ``cache_dir``, compiling it when it is not there yet.

    Safe to call from several processes at once: one compiles, the others wait; a finished library appears by
    an atomic rename.

    Raises:
        CompilerMissingError: when a compiler is needed and none is found (``$CC``, cc, gcc, clang).
        NativeBuildError: when ``cache_dir`` cannot be used or every set of flags fails to compile.
    """
    compiler = _find_compiler()
    sources = _sources()
    path = cache_dir / f"embergate-{_digest(compiler, sources)}.so"
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(cache_dir)
        if path.exists():
            return path
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                _compile(compiler, sources, path)
    except OSError as error:
        raise NativeBuildError(f"the compile cache {cache_dir} cannot be used: {error}") from error
    return path


def _find_compiler() -> str:
    candidates = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    for candidate in filter(None, candidates):
        if (found := shutil.which(candidate)) is not None:
            return found
    raise CompilerMissingError("no C compiler found (install gcc or clang, or set CC)")


def _sources() -> list[Path]:
    """Every C file and header of the workshop, in a fixed order."""
    root = Path(__file__).parent.parent
    return sorted([*root.glob("*/*.c"), *root.glob("*/*.h")])


def _digest(compiler: str, sources: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for part in (_FLAGS, _VARIANTS, _compiler_version(compiler), _cpu()):
        digest.update(repr(part).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _compiler_version(compiler: str) -> str:
    try:
        answer = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"the C compiler {compiler} does not run: {error}") from error
    return answer.stdout


def _cpu() -> str:
    """What tells this CPU from another one for which ``-march=native`` would give other code."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.startswith(kept))


def _require_own(directory: Path) -> None:
    """Refuse to load code from a directory that somebody else could write."""
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NativeBuildError(
            f"the compile cache {directory} must belong to this user and be writable by no other"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, sources: Sequence[Path], path: Path) -> None:
    root = str(Path(__file__).parent.parent)
    files = [str(source) for source in sources if source.suffix == ".c"]
    message = ""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as directory:
        output = Path(directory) / path.name
        for variant in _VARIANTS:
            command = [compiler, *_FLAGS, *variant, f"-I{root}", *files, "-o", str(output), "-lm"]
            try:
                answer = subprocess.run(
                    command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise NativeBuildError(f"the C compiler took longer than {COMPILE_TIMEOUT_S} s") from error
            if answer.returncode == 0:
                output.replace(path)
                return
            message = message or next((line for line in answer.stderr.splitlines() if "error" in line), "")
    raise NativeBuildError(f"the C compiler {compiler} failed: {message}")
