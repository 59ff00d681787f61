from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from backend.model.checkpoint import SafetensorsCheckpoint
from backend.model.config import ModelConfig
from backend.model.errors import ModelLoadError, UnsupportedModelError
from backend.model.loader import open_model
from backend.model.weights import SliceSource
from backend.parallel.group import RankPlace, Span, split
from backend.parallel.shards import PartSource, localise, plan_part
from tests.support.tiny_models import write_tiny_kimi, write_tiny_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, SliceSource]:
    directory = tmp_path_factory.mktemp("llama")
    write_tiny_llama(directory)
    return opened(directory)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, SliceSource]:
    directory = tmp_path_factory.mktemp("kimi")
    write_tiny_kimi(directory)
    return opened(directory)


def opened(directory: Path) -> tuple[ModelConfig, SliceSource]:
    config, source = open_model(directory)
    assert isinstance(source, SliceSource)
    return config, source


@pytest.mark.parametrize(("total", "parts"), [(9, 2), (8, 4), (3, 3), (7, 5)])
def test_a_split_leaves_nothing_out(total: int, parts: int) -> None:
    spans = [split(total, parts, index) for index in range(parts)]
    assert [at for span in spans for at in range(span.first, span.first + span.count)] == list(range(total))
    assert max(span.count for span in spans) - min(span.count for span in spans) <= 1


def test_ranks_stand_in_a_grid() -> None:
    places = [RankPlace(rank, tensor=2, expert=3) for rank in range(6)]
    assert [(place.tensor_rank, place.expert_rank) for place in places] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2),
    ]  # fmt: skip


class Counted:
    """A source that counts the elements that it reads."""

    def __init__(self, source: SliceSource) -> None:
        self._source = source
        self.num_read = 0
        self.names, self.place_of, self.shape_of = source.names, source.place_of, source.shape_of

    def read(self, name: str) -> Tensor:
        tensor = self._source.read(name)
        self.num_read += tensor.numel()
        return tensor

    def read_part(self, name: str, dim: int, start: int, end: int) -> Tensor:
        tensor = self._source.read_part(name, dim, start, end)
        self.num_read += tensor.numel()
        return tensor


@pytest.mark.parametrize("family", ["llama", "kimi"])
def test_parts_put_together_are_the_whole(family: str, request: pytest.FixtureRequest) -> None:
    config, source = request.getfixturevalue(family)
    places = [RankPlace(rank, tensor=2, expert=1) for rank in range(2)]
    counted = [Counted(source) for _ in places]
    parts = [
        PartSource(count, config, plan_part(config, place))
        for place, count in zip(places, counted, strict=True)
    ]
    num_cut = 0
    for name in source.names:
        whole = source.read(name)
        pieces = [part.read(name) for part in parts]
        if pieces[0].shape == whole.shape:
            assert all(torch.equal(piece, whole) for piece in pieces)
            continue
        dim = 0 if pieces[0].shape[0] < whole.shape[0] else 1
        assert torch.equal(torch.cat(pieces, dim), whole), name
        num_cut += 1
    assert num_cut > 5
    num_whole = sum(source.read(name).numel() for name in source.names)
    assert all(count.num_read < 0.65 * num_whole for count in counted), "a rank reads its part only"


def test_a_part_has_the_shape_of_a_smaller_model(kimi: tuple[ModelConfig, SliceSource]) -> None:
    config, _ = kimi
    part = plan_part(config, RankPlace(3, tensor=2, expert=2))
    local = localise(config, part)
    assert config.moe is not None
    assert local.moe is not None
    assert local.num_heads == config.num_heads // 2
    assert local.moe.expert_dim == config.moe.expert_dim // 2
    assert local.moe.num_experts == config.moe.num_experts, "routers see every expert"
    assert part.experts == Span(
        config.moe.num_experts // 2, config.moe.num_experts // 2, config.moe.num_experts
    )
    assert local.vocab_size == config.vocab_size


def test_too_many_ranks_are_refused_by_the_setting(llama: tuple[ModelConfig, SliceSource]) -> None:
    config, _ = llama
    with pytest.raises(UnsupportedModelError, match=r"parallel\.tensor: 3 ranks cannot share 2 groups"):
        plan_part(config, RankPlace(0, tensor=3, expert=1))
    with pytest.raises(UnsupportedModelError, match=r"parallel\.expert: 2 ranks cannot share 0 experts"):
        plan_part(config, RankPlace(0, tensor=1, expert=2))


def test_groups_of_quantised_numbers_are_not_cut(
    tmp_path: Path, llama: tuple[ModelConfig, SliceSource]
) -> None:
    config, _ = llama
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    save_file({name: torch.zeros(1, 1)}, tmp_path / "model.safetensors")
    source = PartSource(
        SafetensorsCheckpoint(tmp_path), config, plan_part(config, RankPlace(1, tensor=2, expert=1))
    )
    with pytest.raises(ModelLoadError, match="within a group of quantised numbers"):
        source.read(name)
