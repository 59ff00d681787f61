"""The native CPU forms: C compiled on first use, called through ctypes."""

from kernels.native.build import CompilerMissingError, NativeBuildError
from kernels.native.library import NativeLibrary, load_native
from kernels.native.tensors import address, require_rows

__all__ = [
    "CompilerMissingError",
    "NativeBuildError",
    "NativeLibrary",
    "address",
    "load_native",
    "require_rows",
]
