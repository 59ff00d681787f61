"""Images among messages: placeholders in the prompt, one for each token, and where they are."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from backend.text.kimi.model_text import KimiModelText
from backend.text.media import ImageLimits, may_hold_media
from backend.text.messages import BadMessageError
from backend.text.model_text import ModelTextError, load_model_text
from backend.text.prompt import Conversation, Prompt
from tests.support.kimi_text import tiny_ranks, write_kimi_text

LIMITS = ImageLimits(max_tokens=100)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_kimi_text(tmp_path)
    return tmp_path


def load(directory: Path, limits: ImageLimits | None = LIMITS) -> KimiModelText:
    vocab_size = len(tiny_ranks()) + 256
    text = load_model_text(directory, cache_chars=1000, vocab_size=vocab_size, image_limits=limits)
    assert isinstance(text, KimiModelText)
    return text


def image_part(width: int, height: int, colour: str = "red") -> dict[str, Any]:
    file = BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def encode(text: KimiModelText, *parts: Any) -> Prompt:
    return text.encode(Conversation([{"role": "user", "content": list(parts)}]))


def test_every_image_has_as_many_placeholders_as_tokens(directory: Path) -> None:
    text = load(directory)
    pad = text.tokenizer.special_tokens["<|media_pad|>"]
    first, second = image_part(100, 50), image_part(28, 28, "blue")
    prompt = encode(text, "see", first, "and", second, first)
    assert [span.num_tokens for span in prompt.media] == [8, 1, 8]
    assert prompt.token_ids.count(pad) == 17
    for span in prompt.media:
        assert prompt.token_ids[span.start : span.end] == [pad] * span.num_tokens
        assert pad not in (prompt.token_ids[span.start - 1], prompt.token_ids[span.end])
        assert len(span.patches) == span.rows * span.columns * 588
    digests = [span.digest for span in prompt.media]
    assert digests[0] == digests[2] != digests[1]
    # But for the placeholders it is the prompt as the template writes it.
    special = text.tokenizer.special_tokens
    bare = [token for token in prompt.token_ids if token != pad]
    begin, content, end = (special[f"<|media_{name}|>"] for name in ("begin", "content", "end"))
    assert [bare.count(mark) for mark in (begin, content, end)] == [3, 3, 3]


def test_a_square_image_costs_what_the_model_charges(directory: Path) -> None:
    text = load(directory)
    asked = encode(text, image_part(224, 224), "Describe the image.")
    without = encode(text, "Describe the image.")
    # Begin, content and end mark, the word "image" and a line break; 64 for the image itself.
    marks = 3 + len(text.tokenizer.encode_text("image")) + len(text.tokenizer.encode_text("\n"))
    assert len(asked.token_ids) == len(without.token_ids) + marks + 64


def test_text_that_spells_a_placeholder_is_no_image(directory: Path) -> None:
    text = load(directory)
    pad = text.tokenizer.special_tokens["<|media_pad|>"]
    prompt = encode(text, "<|media_pad|>", image_part(28, 28), "<|media_begin|>image<|media_pad|>")
    assert prompt.token_ids.count(pad) == 1
    assert prompt.token_ids[prompt.media[0].start] == pad


def test_too_many_tokens_of_images_are_refused_at_the_one_too_many(directory: Path) -> None:
    parts = [image_part(224, 140), image_part(224, 140), image_part(224, 140)]
    with pytest.raises(BadMessageError, match="100 tokens at most") as caught:
        encode(load(directory), *parts)
    assert caught.value.param == "messages[0].content[2]"


def test_images_in_tool_results_are_read_too(directory: Path) -> None:
    text = load(directory)
    call = {"id": "functions.see:0", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.see:0", "content": [image_part(28, 28)]},
    ]
    assert len(text.encode(Conversation(messages)).media) == 1


@pytest.mark.parametrize(
    ("limits", "part", "message"),
    [
        (None, image_part(28, 28), "takes text only, no images"),
        (None, {"type": "video_url", "video_url": {"url": "data:"}}, "takes text only, no video"),
        (LIMITS, {"type": "video_url", "video_url": {"url": "data:"}}, "takes text and images, no video"),
    ],
)
def test_what_the_model_cannot_see_is_refused(
    directory: Path, limits: ImageLimits | None, part: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadMessageError, match=message) as caught:
        encode(load(directory, limits), "a", part)
    assert caught.value.param == "messages[0].content[1]"


class TestRules:
    def write(self, directory: Path, config: dict[str, Any], **rules: Any) -> None:
        (directory / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": rules}))
        (directory / "config.json").write_text(json.dumps({"vision_config": config}))

    def test_the_checkpoint_says_how_images_are_prepared(self, directory: Path) -> None:
        tower = {"patch_size": 7, "merge_kernel_size": [2, 2]}
        self.write(directory, tower, patch_size=7, merge_kernel_size=2, in_patch_limit=64, sample_fps=2.0)
        (span,) = encode(load(directory), image_part(28, 28)).media
        assert (span.rows, span.columns, span.num_tokens) == (4, 4, 4)
        (span,) = encode(load(directory), image_part(200, 200)).media
        assert span.num_tokens == 25

    @pytest.mark.parametrize(
        ("tower", "rules", "field"),
        [
            ({"patch_size": 14}, {"patch_size": 16}, "patch_size"),
            ({"merge_kernel_size": [2, 2]}, {"merge_kernel_size": 4}, "merge_kernel_size"),
            ({}, {"image_mean": [0.4, 0.5, 0.5]}, "image_mean"),
            ({}, {"fixed_output_tokens": 64}, "fixed_output_tokens"),
            ({}, {"in_patch_limit": 0}, "in_patch_limit"),
            ({}, {"in_patch_limit": True}, "in_patch_limit"),
            ({}, {"crop": True}, "crop"),
        ],
    )
    def test_what_cannot_be_honoured_is_refused_by_name(
        self, directory: Path, tower: dict[str, Any], rules: dict[str, Any], field: str
    ) -> None:
        self.write(directory, tower, **rules)
        with pytest.raises(ModelTextError, match=rf"preprocessor_config\.json: media_proc_cfg\.{field}: "):
            load(directory)

    def test_a_file_that_is_no_json_is_named(self, directory: Path) -> None:
        (directory / "preprocessor_config.json").write_text("{")
        with pytest.raises(ModelTextError, match=r"preprocessor_config\.json: cannot be read"):
            load(directory)


@pytest.mark.parametrize(
    ("content", "holds"),
    [
        ("text", False),
        (None, False),
        (["text", {"type": "text", "text": "a"}], False),
        ([{"type": "text"}, {"type": "image_url"}], True),
        ([{"type": "image"}], True),
        ([{}], True),
    ],
)
def test_contents_that_may_hold_images_are_found(content: Any, holds: bool) -> None:
    assert may_hold_media([{"role": "user", "content": "x"}, {"role": "user", "content": content}]) is holds
