"""The embedded model, held to a schema by its own vocabulary."""

from __future__ import annotations

import itertools
import json
import time

import jsonschema
import pytest

from backend.config import BackendConfig, CacheConfig, DeviceConfig, ModelSource
from backend.engine.engine import Engine
from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.runner import ModelRunner
from backend.engine.worker import load_grammars
from backend.text.answer_rules import AnswerRules, ContentRule
from backend.text.grammar import write_grammar
from backend.text.model_text import load_model_text
from backend.text.prompt import Conversation
from tests.support.installation import prepared_models

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Spain"]},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "country", "capital"],
    "additionalProperties": False,
}


@pytest.mark.model
def test_the_embedded_model_answers_in_json() -> None:
    path = prepared_models() / "smollm2-135m-instruct" / "llama"
    config = BackendConfig(
        replica_id="r0",
        model=ModelSource(path=str(path), served_as="m", max_model_len=256),
        cache=CacheConfig(num_blocks=32),
        device=DeviceConfig(device="cpu", threads=1),
    )
    runner = ModelRunner.load(config)
    engine = Engine(
        runner, config, clock_s=time.monotonic, draw_seed=itertools.count().__next__,
        grammars=load_grammars(config, runner),
    )  # fmt: skip
    text = load_model_text(path, cache_chars=0, vocab_size=runner.info.vocab_size)
    prompt = text.encode(Conversation([{"role": "user", "content": "Tell me of Paris, in JSON."}]))
    rules = AnswerRules(ContentRule(SCHEMA, "schema"))
    grammar = write_grammar(rules, marks=None, reasoning_end=prompt.reasoning_end)
    sampling = SamplingParams(max_tokens=80, temperature=0.0, grammar=grammar)
    engine.submit(SequenceRequest(sequence_id=1, prompt_token_ids=prompt.token_ids, sampling=sampling))
    outputs = []
    while engine.has_work:
        engine.step()
        outputs += engine.take_outputs()
    assert outputs[-1].finish_reason == "stop", outputs[-1].message
    assert outputs[-1].is_last_text
    said = b"".join(text.token_bytes[token_id] for output in outputs for token_id in output.token_ids)
    jsonschema.validate(json.loads(said), SCHEMA)
