"""How an image is brought to the size and form that a vision tower reads."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PREPROCESSOR_FILE: Final = "preprocessor_config.json"
_CONFIG_FILE: Final = "config.json"

# The tower's own arithmetic maps 0..255 to -1..1, which is mean and deviation 0.5.
_HALF: Final = [0.5, 0.5, 0.5]
# What a checkpoint may state; the others concern video or the class that Moonshot's code makes of it.
_HONOURED: Final = ("patch_size", "merge_kernel_size", "in_patch_limit", "patch_limit_on_one_side")
_OF_VIDEO: Final = (
    "in_patch_limit_each_frame",
    "in_patch_limit_video",
    "max_num_frames",
    "max_num_frames_each_video",
    "sample_fps",
    "temporal_merge_kernel_size",
    "timestamp_mode",
)
_DIGESTED: Final = struct.Struct("<4I")


class BadImageRulesError(ValueError):
    """A checkpoint's preprocessing is not one that this engine does; the message names file and field."""


@dataclass(frozen=True, slots=True)
class ImageRules:
    """Sizes in pixels and patches.

    An image has at most ``max_patches`` patches of ``patch_size`` squared, and at most ``max_side_patches``
    on a side; ``merge_size`` squared patches become one token.
    """

    patch_size: int = 14
    merge_size: int = 2
    max_patches: int = 16384
    max_side_patches: int = 512

    @property
    def token_size(self) -> int:
        """The side of the square that one token stands for, in pixels."""
        return self.patch_size * self.merge_size

    def encode(self) -> bytes:
        """The rules as bytes, for digests."""
        return _DIGESTED.pack(self.patch_size, self.merge_size, self.max_patches, self.max_side_patches)

    def scaled_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after scaling: never up, and only as far down as the limits ask."""
        side = self.max_side_patches * self.patch_size
        num_patches = max(1, width // self.patch_size) * max(1, height // self.patch_size)
        scale = min(1.0, math.sqrt(self.max_patches / num_patches), side / width, side / height)
        return min(max(1, int(width * scale)), side), min(max(1, int(height * scale)), side)

    def padded_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after padding at the right and at the bottom to whole tokens."""
        unit = self.token_size
        return -(-width // unit) * unit, -(-height // unit) * unit

    @classmethod
    def from_directory(cls, directory: Path) -> ImageRules:
        """Read a checkpoint's ``preprocessor_config.json``; without one the rules are those of Kimi K2.5.

        Raises:
            BadImageRulesError: naming what cannot be honoured, or does not fit the tower.
        """
        where = f"{directory / PREPROCESSOR_FILE}: media_proc_cfg"
        rules = _read_rules(_read_section(directory / PREPROCESSOR_FILE, "media_proc_cfg"), where)
        tower = _read_section(directory / _CONFIG_FILE, "vision_config")
        merge = tower.get("merge_kernel_size", [rules.merge_size])
        if tower.get("patch_size", rules.patch_size) != rules.patch_size:
            raise BadImageRulesError(f"{where}.patch_size: {rules.patch_size} is not the tower's")
        if not isinstance(merge, list) or merge[:1] != [rules.merge_size]:
            raise BadImageRulesError(f"{where}.merge_kernel_size: {rules.merge_size} is not the tower's")
        return rules


def _read_section(path: Path, name: str) -> Mapping[str, Any]:
    """One object of a JSON file, empty when there is no such file or object."""
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadImageRulesError(f"{path}: cannot be read: {error}") from error
    section = raw.get(name) or {} if isinstance(raw, dict) else None
    if not isinstance(section, dict):
        raise BadImageRulesError(f"{path}: {name}: must be an object")
    return section


def _read_rules(raw: Mapping[str, Any], where: str) -> ImageRules:
    for name, honoured in (("image_mean", _HALF), ("image_std", _HALF), ("fixed_output_tokens", None)):
        if raw.get(name, honoured) != honoured:
            raise BadImageRulesError(f"{where}.{name}: {raw[name]!r} is not supported, only {honoured!r}")
    known = {*_HONOURED, *_OF_VIDEO, "image_mean", "image_std", "fixed_output_tokens"}
    if unknown := raw.keys() - known:
        raise BadImageRulesError(f"{where}.{min(unknown)}: unknown")
    stock = ImageRules()
    return ImageRules(
        patch_size=_size(raw, "patch_size", stock.patch_size, where),
        merge_size=_size(raw, "merge_kernel_size", stock.merge_size, where),
        max_patches=_size(raw, "in_patch_limit", stock.max_patches, where),
        max_side_patches=_size(raw, "patch_limit_on_one_side", stock.max_side_patches, where),
    )


def _size(raw: Mapping[str, Any], name: str, default: int, where: str) -> int:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise BadImageRulesError(f"{where}.{name}: {value!r} must be an integer of at least 1")
    return value
