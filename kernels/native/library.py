"""The loaded native library: one callable per op, its thread count bound."""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kernels.native.build import NativeBuildError, build_library, default_cache_dir
from kernels.native.signatures import SIGNATURES

NativeOp = Callable[..., None]
"""A C function without its first argument, the crew of threads: addresses, sizes and flags."""

SWITCH = "EMBERGATE_NATIVE"
"""Environment variable; ``off`` forces the references."""


class NativeLibrary:
    """The native ops of this process. Calls release the GIL; each op uses up to ``threads`` threads of the
    instance's own.

    The attributes are the C functions of ``kernels/<op>/native.c``; only the ops' dispatch calls them. An
    instance belongs to whoever composes the model; it may be used from several threads at
    once, of which one has the threads at a time and the others compute alone.
    """

    packed_linear: NativeOp
    packed_head_linear: NativeOp
    packed_embedding: NativeOp
    rms_norm: NativeOp
    silu_mul: NativeOp
    rope: NativeOp
    store_kv: NativeOp
    store_latent: NativeOp
    paged_attention: NativeOp
    paged_mla_decode: NativeOp
    moe_gate: NativeOp
    moe_weigh_all: NativeOp
    expert_mlp: NativeOp

    def __init__(self, path: Path, threads: int) -> None:
        """Load the compiled library at ``path``.

        Raises:
            NativeBuildError: when it cannot be loaded or lacks an op.
            ValueError: when ``threads`` is below 1.
        """
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self.path = path
        self.threads = threads
        try:
            library = ctypes.CDLL(str(path))
            crew = _hire(library, threads)
            release = weakref.finalize(self, library.embergate_crew_free, ctypes.c_void_p(crew))
            release.atexit = False  # another thread may be within an op; the end of the process ends them all
            for name, signature in SIGNATURES.items():
                setattr(self, name, _bind(library, name, signature, crew))
        except (OSError, AttributeError) as error:
            raise NativeBuildError(f"the native library {path} cannot be used: {error}") from error


def load_native(
    threads: int, *, cache_dir: Path | None = None, log: logging.Logger | None = None
) -> NativeLibrary | None:
    """Compile (once per source, flags and CPU) and load the native ops; None where that is impossible.

    ``EMBERGATE_NATIVE=off`` in the environment forces None. Without a C compiler, or when it fails, one
    warning says so and the references serve.

    Args:
        threads: upper limit of threads per op.
        cache_dir: where compiled libraries lie; see :func:`kernels.native.build.default_cache_dir`.
        log: receives the warning; by default the logger ``kernels.native``.
    """
    if os.environ.get(SWITCH) == "off":
        return None
    try:
        return NativeLibrary(build_library(cache_dir or default_cache_dir()), threads)
    except NativeBuildError as error:
        (log or logging.getLogger("kernels.native")).warning(
            "native CPU kernels are off, torch serves: %s", error
        )
        return None


def _hire(library: ctypes.CDLL, threads: int) -> int:
    hire = library.embergate_crew_new
    hire.restype, hire.argtypes = ctypes.c_void_p, [ctypes.c_int64]
    library.embergate_crew_free.restype = None
    crew = hire(threads)
    if crew is None:
        raise NativeBuildError(f"there is no memory for {threads} threads")
    return int(crew)


def _bind(library: ctypes.CDLL, name: str, signature: str, crew: int) -> NativeOp:
    function = getattr(library, f"embergate_{name}")
    function.restype = None
    function.argtypes = [ctypes.c_void_p, *(_C_TYPES[letter] for letter in signature)]
    return partial(function, crew)


_C_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
