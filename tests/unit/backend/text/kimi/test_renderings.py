"""What the published template, tool declaration and tokenizer make of 400 conversations, token by token."""

from __future__ import annotations

import hashlib
import json

from backend.text.kimi.template import KimiTemplate
from backend.text.kimi.thinking import Thinking
from backend.text.kimi.tokenizer import TiktokenTokenizer
from tests.support.shared_data import shared_data


def test_all_conversations_are_rendered_and_encoded_as_published(real: TiktokenTokenizer) -> None:
    template = KimiTemplate()
    rows = shared_data("kimi-tokenizer/renderings-400.jsonl").read_text("utf-8").splitlines()
    assert len(rows) == 400
    for number, line in enumerate(rows):
        row = json.loads(line)
        prompt = template.render(
            row["messages"],
            tools=row["tools"] or (),
            thinking=Thinking(row["thinking"], row["preserve_thinking"]),
            add_generation_prompt=row["add_generation_prompt"],
        )
        assert prompt.text == row["rendered"], f"conversation {number}"
        token_ids = real.encode_pieces(prompt.texts, prompt.specials)
        assert len(token_ids) == row["num_tokens"], f"conversation {number}"
        digest = hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()
        assert digest == row["token_ids_sha256"], f"conversation {number}"
