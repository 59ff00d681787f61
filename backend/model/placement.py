"""Where and how a model's weights and activations live."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from backend.config import DeviceConfig
from backend.model.config import ModelConfig
from backend.model.errors import ModelLoadError
from backend.model.lazy_memory import lazy_zeros
from kernels.native import NativeLibrary, load_native

_LANES = 32
"""Native kernels want widths in multiples of this."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Placement:
    """``native`` is the compiled CPU kernels; with them weights are packed, activations are float32.

    Without them weights are dense tensors of ``dtype`` on ``device`` and every op runs in its torch form.
    """

    device: torch.device
    dtype: torch.dtype
    native: NativeLibrary | None = None

    def zeros(self, *shape: int) -> Tensor:
        """Zeros for a cache; on a CPU they take memory only as they are written."""
        if self.device.type == "cpu":
            return lazy_zeros(shape, self.dtype)
        return torch.zeros(shape, device=self.device, dtype=self.dtype)

    def kv_memory_bytes(self) -> int:
        """What a KV cache may take when nothing is configured: most of what is free on a GPU; on a CPU, which
        replicas and everything else share, an eighth of the machine's memory."""
        if self.device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(self.device)
            return free_bytes * 9 // 10
        return psutil.virtual_memory().total // 8

    def memory_bytes(self) -> int:
        """All the memory that the device has."""
        if self.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        return psutil.virtual_memory().total

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def put(self, vector: Tensor) -> Tensor:
        """A copy of a weight, in place and type."""
        return vector.to(device=self.device, dtype=self.dtype)


def choose_placement(device_config: DeviceConfig, model: ModelConfig) -> Placement:
    """Decide device, type and kernels.

    Raises:
        ModelLoadError: when the configuration asks for what this machine does not have.
    """
    device = _choose_device(device_config)
    dtype = _DTYPES.get(device_config.dtype, torch.float32 if device.type == "cpu" else torch.bfloat16)
    if device.type != "cpu" or dtype != torch.float32 or device_config.weights == "float32":
        if device_config.weights == "packed":
            raise ModelLoadError("device.weights: 'packed' needs device 'cpu' and dtype 'float32' or 'auto'")
        return Placement(device, dtype)
    misfit = _native_misfit(model)
    native = load_native(count_threads(device_config)) if misfit is None else None
    if native is None and device_config.weights == "packed":
        reason = misfit or "there is no working C compiler"
        raise ModelLoadError(f"device.weights: 'packed' is not possible: {reason}")
    return Placement(device, dtype, native)


def count_threads(device_config: DeviceConfig) -> int:
    """Threads of one operation: as configured, or every core that this process may use."""
    return device_config.threads or len(os.sched_getaffinity(0))


def _choose_device(device_config: DeviceConfig) -> torch.device:
    name = device_config.device
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelLoadError(f"device.device: {name!r} is not a device; try auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError(f"device.device: {name!r}, but torch finds no CUDA device here")
    return device


def _native_misfit(model: ModelConfig) -> str | None:
    """Why the native kernels cannot run this model, or None when they can."""
    widths = {"hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size}
    if model.mla is None:
        widths["head_dim"] = model.head_dim
    else:
        widths |= {"kv_lora_rank": model.mla.kv_lora_rank, "qk_rope_head_dim": model.mla.rope_dim}
        widths |= {"qk_nope_head_dim": model.mla.nope_dim, "v_head_dim": model.mla.v_dim}
    if model.moe is not None:
        widths["moe_intermediate_size"] = model.moe.expert_dim
    for field, width in widths.items():
        if width % _LANES:
            return f"{field} {width} is not a multiple of {_LANES}"
    return None
