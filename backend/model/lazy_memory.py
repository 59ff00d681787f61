"""Large tensors whose memory the operating system provides as it is used."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in main memory, aligned to pages, that cost neither time nor memory until they are written.

    Filling a cache of a gibibyte with zeros takes seconds on a busy machine, and most of it may never be
    used. Fresh pages are zero already.

    Raises:
        MemoryError: when there is no address space left for them.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes / 2**30:.2f} GiB of memory cannot be had: {error.strerror}") from error
    return torch.frombuffer(pages, dtype=dtype).view(shape)
