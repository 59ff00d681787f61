"""The encoder: equal to the reference, whatever else is in its batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertModel

from backend.embeddings.bert import Bert, BertError
from backend.embeddings.encoder import Encoder
from tests.support.tiny_bert import BEGIN, END, MAX_LEN, write_tiny_bert

TEXTS = ["a red fox", "the moon", "blue fox sees the green moon and a fox"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BertModel]:
    path = tmp_path_factory.mktemp("bert") / "model"
    return path, write_tiny_bert(path)


@pytest.fixture(scope="module")
def encoder(checkpoint: tuple[Path, BertModel]) -> Encoder:
    return Encoder(checkpoint[0], max_model_len=512)


def test_hidden_states_are_those_of_the_reference(checkpoint: tuple[Path, BertModel]) -> None:
    path, reference = checkpoint
    token_ids = torch.tensor([[2, 5, 8, 3, 0, 0], [2, 4, 6, 8, 9, 3]])
    mask = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    with torch.inference_mode():
        expected = reference(input_ids=token_ids, attention_mask=mask.long()).last_hidden_state
    hidden = Bert.from_directory(path).hidden_states(token_ids, mask)
    assert torch.allclose(hidden[mask], expected[mask], atol=1e-5)


def test_tokenizing_neither_cuts_nor_fills_up(encoder: Encoder) -> None:
    assert [len(ids) for ids in encoder.tokenize(TEXTS)] == [5, 4, 11]
    assert encoder.tokenize(["a"]) == [[BEGIN, 4, END]]


def test_a_vector_does_not_depend_on_its_batch(encoder: Encoder) -> None:
    inputs = encoder.tokenize(TEXTS)
    together = encoder.embed(inputs, ["mean", "cls", "mean"])
    for ids, pooling, vector in zip(inputs, ("mean", "cls", "mean"), together, strict=True):
        (alone,) = encoder.embed([ids], [pooling])  # type: ignore[list-item]
        assert np.allclose(alone, vector, atol=1e-6)
        assert np.isclose(np.linalg.norm(vector), 1.0, atol=1e-6)
        assert vector.dtype == np.float32


def test_the_mean_counts_no_filling(encoder: Encoder, checkpoint: tuple[Path, BertModel]) -> None:
    ids = encoder.tokenize(["a red fox"])[0]
    with torch.inference_mode():
        hidden = checkpoint[1](input_ids=torch.tensor([ids])).last_hidden_state[0]
    mean = hidden.mean(0)
    expected = (mean / mean.norm()).numpy()
    padded = encoder.embed([ids, ids + [5] * 4], ["mean", "mean"])[0]
    assert np.allclose(padded, expected, atol=1e-5)


def test_token_ids_get_the_marks_that_they_lack_and_long_ones_are_cut(encoder: Encoder) -> None:
    assert encoder.framed([4, 5]) == encoder.framed([BEGIN, 4, 5, END]) == [BEGIN, 4, 5, END]
    assert encoder.max_model_len == MAX_LEN
    cut = encoder.shortened([BEGIN, *[5] * 30, END])
    assert (len(cut), cut[0], cut[-1]) == (MAX_LEN, BEGIN, END)
    assert encoder.shortened([BEGIN, END]) == [BEGIN, END]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "roberta"}, "model_type 'roberta'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"vocab_size": 99}, "word embeddings"),
        ({"num_hidden_layers": 5}, "lacks the tensor"),
        ({"hidden_size": "x"}, "cannot be read"),
    ],
)
def test_other_models_are_refused_in_a_sentence(
    tmp_path: Path, checkpoint: tuple[Path, BertModel], changes: dict[str, object], message: str
) -> None:
    config = json.loads((checkpoint[0] / "config.json").read_text())
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(checkpoint[0] / name)
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(BertError, match=message):
        Encoder(tmp_path, max_model_len=8)
