"""MoonViT and its projector: from the pixels of one item to embeddings of the language model.

An item is an image, or up to a few frames of a video that are looked at together. Attention is among all
patches of an item and never between items, so what comes out for an image depends on nothing but the image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from backend.model.linear import place
from backend.model.placement import Placement
from backend.model.vision_config import VisionConfig
from backend.model.weights import WeightReader

_EPS = 1e-5
_BASE = 10000.0
_COLOURS = 3
_TOWER, _PROJECTOR = "vision_tower", "mm_projector"


@dataclass(frozen=True, slots=True)
class Grid:
    """How the patches of an item lie: ``frames`` of ``rows * columns``, frame by frame and row by row."""

    rows: int
    columns: int
    frames: int = 1

    @property
    def num_patches(self) -> int:
        return self.frames * self.rows * self.columns


@dataclass(frozen=True, slots=True)
class _Affine:
    """A weight and its bias, of a linear layer or a norm."""

    weight: Tensor
    bias: Tensor

    def project(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def normalise(self, x: Tensor, eps: float = _EPS) -> Tensor:
        return functional.layer_norm(x, self.bias.shape, self.weight, self.bias, eps)


@dataclass(frozen=True, slots=True)
class _Block:
    """One pre-norm layer of the tower."""

    norm0: _Affine
    wqkv: _Affine
    wo: _Affine
    norm1: _Affine
    fc0: _Affine
    fc1: _Affine

    def __call__(self, x: Tensor, rotation: Tensor, num_heads: int) -> Tensor:
        """``[patches, hidden]`` to the same."""
        x = x + self.wo.project(self._attend(self.norm0.normalise(x), rotation, num_heads))
        inner = functional.gelu(self.fc0.project(self.norm1.normalise(x)), approximate="tanh")
        return x + self.fc1.project(inner)

    def _attend(self, x: Tensor, rotation: Tensor, num_heads: int) -> Tensor:
        num_patches, hidden = x.shape
        queries, keys, values = self.wqkv.project(x).view(num_patches, 3, num_heads, -1).unbind(1)
        queries, keys = rotate(queries, rotation), rotate(keys, rotation)
        # One batch of [heads, patches, head_dim]: with a leading dimension torch takes its tiled kernel,
        # which needs no matrix of patches by patches.
        heads = [part.transpose(0, 1).unsqueeze(0) for part in (queries, keys, values)]
        out = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        return out.squeeze(0).transpose(0, 1).reshape(num_patches, hidden)


class VisionTower:
    """A loaded tower with its projector. :meth:`encode` is a pure function.

    Weights are dense, of the placement's type: images are long products, which gain nothing from packing.

    Raises:
        ModelLoadError: when a weight is missing or has another shape.
    """

    def __init__(self, config: VisionConfig, reader: WeightReader, placement: Placement) -> None:
        self.config = config
        self._placement = placement
        load = _AffineReader(reader, placement)
        hidden, merged = config.hidden_size, config.merged_size
        size = config.patch_size
        kernel = reader.tensor(f"{_TOWER}.patch_embed.proj.weight", hidden, _COLOURS, size, size)
        bias = reader.vector(f"{_TOWER}.patch_embed.proj.bias", hidden)
        self._patch_embed = _Affine(placement.put(kernel.flatten(1)), placement.put(bias))
        positions = reader.tensor(
            f"{_TOWER}.patch_embed.pos_emb.weight", config.grid_height, config.grid_width, hidden
        )
        self._positions = positions.to(placement.device, torch.float32)
        self._blocks = tuple(_read_block(load, config, block) for block in range(config.num_layers))
        self._final_norm = load.norm(f"{_TOWER}.encoder.final_layernorm", hidden)
        self._pre_norm = load.norm(f"{_PROJECTOR}.pre_norm", hidden)
        self._project_in = load.linear(f"{_PROJECTOR}.proj.0", merged, merged)
        self._project_out = load.linear(f"{_PROJECTOR}.proj.2", config.out_size, merged)

    def num_tokens(self, grid: Grid) -> int:
        """Embeddings that an item becomes, however many frames it has."""
        return (grid.rows // self.config.merge_size) * (grid.columns // self.config.merge_size)

    def encode(self, pixels: Tensor, grid: Grid, pause: Callable[[], None] = lambda: None) -> Tensor:
        """Embed one item.

        Args:
            pixels: ``[patches, 3, patch_size, patch_size]`` uint8, on any device.
            grid: how they lie.
            pause: called before every layer; may raise to end the work.

        Returns:
            ``[tokens, out_size]``, of the placement's type and on its device.

        Raises:
            ValueError: when the pixels do not fit the grid, or the grid does not fit the tower.
        """
        self._check(pixels, grid)
        config, dtype = self.config, self._placement.dtype
        # 0..255 to -1..1, which is what a mean and a deviation of 0.5 make of it.
        scaled = pixels.to(self._placement.device).flatten(1).float().div(127.5).sub(1.0)
        x = self._patch_embed.project(scaled.to(dtype)) + self._place_patches(grid).to(dtype)
        rotation = axial_rotation(grid, config.head_dim, self._placement.device)
        for block in self._blocks:
            pause()
            x = block(x, rotation, config.num_heads)
        return self._merge(self._final_norm.normalise(x), grid)

    def _check(self, pixels: Tensor, grid: Grid) -> None:
        size, merge = self.config.patch_size, self.config.merge_size
        if min(grid.rows, grid.columns, grid.frames) < 1 or grid.frames > self.config.max_frames:
            raise ValueError(f"grid: {grid} is empty or has more than {self.config.max_frames} frames")
        if grid.rows % merge or grid.columns % merge:
            raise ValueError(f"grid: {grid.rows} x {grid.columns} patches are not whole squares of {merge}")
        if tuple(pixels.shape) != (grid.num_patches, _COLOURS, size, size):
            raise ValueError(f"pixels: {list(pixels.shape)} do not fit {grid}")

    def _place_patches(self, grid: Grid) -> Tensor:
        """What tells patches their place: the learned grid, stretched, and the instant of frames."""
        learned = self._positions
        if learned.shape[:2] != (grid.rows, grid.columns):
            stretched = functional.interpolate(
                learned.permute(2, 0, 1).unsqueeze(0), size=(grid.rows, grid.columns), mode="bicubic"
            )
            learned = stretched.squeeze(0).permute(1, 2, 0)
        flat = learned.reshape(-1, self.config.hidden_size)
        if grid.frames == 1:
            return flat
        instants = sincos_rows(grid.frames, self.config.hidden_size, flat.device)
        return (flat.unsqueeze(0) + instants.unsqueeze(1)).flatten(0, 1)

    def _merge(self, x: Tensor, grid: Grid) -> Tensor:
        """Average over the frames, then a square of patches to one embedding."""
        merge, hidden = self.config.merge_size, self.config.hidden_size
        pooled = x
        if grid.frames > 1:
            pooled = x.view(grid.frames, -1, hidden).float().mean(0).to(x.dtype)
        squares = pooled.view(grid.rows // merge, merge, grid.columns // merge, merge, hidden)
        patches = squares.transpose(1, 2).reshape(-1, merge * merge, hidden)
        normed = self._pre_norm.normalise(patches, self.config.projector_eps).flatten(1)
        return self._project_out.project(functional.gelu(self._project_in.project(normed)))


def axial_rotation(grid: Grid, head_dim: int, device: torch.device) -> Tensor:
    """The rotation of each patch as complex numbers ``[patches, 1, head_dim / 2]``.

    Pairs of columns turn by the patch's column and by its row in turns, the column first; frames do not turn.
    """
    exponents = torch.arange(0, head_dim, 4, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / _BASE**exponents
    columns = torch.arange(grid.columns, device=device).outer(frequencies)
    rows = torch.arange(grid.rows, device=device).outer(frequencies)
    shape = (grid.rows, grid.columns, len(frequencies))
    angles = torch.stack((columns.unsqueeze(0).expand(shape), rows.unsqueeze(1).expand(shape)), dim=-1)
    flat = angles.reshape(grid.rows * grid.columns, 1, -1).repeat(grid.frames, 1, 1)
    return torch.polar(torch.ones_like(flat), flat)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn neighbouring pairs of columns of ``[patches, heads, head_dim]``, in float32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


def sincos_rows(num_rows: int, width: int, device: torch.device) -> Tensor:
    """Fixed positions ``[num_rows, width]``: sines, then cosines."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    angles = torch.arange(num_rows, dtype=torch.float32, device=device).outer(1.0 / _BASE**exponents)
    return torch.cat((angles.sin(), angles.cos()), dim=1)


class _AffineReader:
    def __init__(self, reader: WeightReader, placement: Placement) -> None:
        self._reader = reader
        self._placement = placement

    def linear(self, name: str, rows: int, columns: int) -> _Affine:
        weight = place(self._reader.matrix(f"{name}.weight", rows, columns), self._placement)
        return _Affine(weight, self._placement.put(self._reader.vector(f"{name}.bias", rows)))

    def norm(self, name: str, size: int) -> _Affine:
        weight, bias = (self._reader.vector(f"{name}.{part}", size) for part in ("weight", "bias"))
        return _Affine(self._placement.put(weight), self._placement.put(bias))


def _read_block(load: _AffineReader, config: VisionConfig, block: int) -> _Block:
    prefix = f"{_TOWER}.encoder.blocks.{block}"
    hidden, inner = config.hidden_size, config.intermediate_size
    return _Block(
        norm0=load.norm(f"{prefix}.norm0", hidden),
        wqkv=load.linear(f"{prefix}.wqkv", 3 * hidden, hidden),
        wo=load.linear(f"{prefix}.wo", hidden, hidden),
        norm1=load.norm(f"{prefix}.norm1", hidden),
        fc0=load.linear(f"{prefix}.mlp.fc0", inner, hidden),
        fc1=load.linear(f"{prefix}.mlp.fc1", hidden, inner),
    )
