"""What a checkpoint's tensors are, read from the heads of its files, without weights and without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.model.errors import ModelLoadError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """``dtype`` as safetensors spells it, such as ``BF16`` or ``F8_E4M3``."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """Every tensor of a checkpoint directory by its stored name.

    Raises:
        ModelLoadError: naming the file that is missing, cut off or not what it should be.
    """
    if not (directory / INDEX).is_file():
        return _read_head(directory / SINGLE)
    weight_map = read_object(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelLoadError(f"{directory / INDEX}: weight_map: missing or not a mapping to file names")
    headers: dict[str, TensorHeader] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise ModelLoadError(f"{directory / INDEX}: weight_map: {file!r} is not a file name")
        headers |= _read_head(directory / file)
    absent = sorted(weight_map.keys() - headers.keys())
    if absent:
        raise ModelLoadError(f"{directory / weight_map[absent[0]]}: {absent[0]}: missing (named by {INDEX})")
    return headers


def read_object(path: Path) -> Mapping[str, Any]:
    """Decode a JSON object.

    Raises:
        ModelLoadError: when the file is missing or is not one.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: must be a JSON object")
    return content


def _read_head(path: Path) -> dict[str, TensorHeader]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 0 < size <= _MAX_HEADER_BYTES:
                raise ModelLoadError(f"{path}: not a readable safetensors file")
            head: dict[str, dict[str, Any]] = json.loads(file.read(size))
        entries = {name: entry for name, entry in head.items() if name != "__metadata__"}
        headers = {
            name: TensorHeader(
                str(entry["dtype"]),
                tuple(int(length) for length in entry["shape"]),
                int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
            )
            for name, entry in entries.items()
        }
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: missing") from None
    except ModelLoadError:
        raise
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelLoadError(f"{path}: not a readable safetensors file: {error}") from error
    expected = _LENGTH_BYTES + size + end
    if path.stat().st_size != expected:
        raise ModelLoadError(f"{path}: {path.stat().st_size} bytes, and its head says {expected}")
    return headers
