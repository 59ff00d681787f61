"""The embedded model itself: both forms against a plain transformers Llama on the same weights.

Twenty prompts of two hundred greedy tokens. The ``llama`` form generates; transformers then reads each answer
in one pass, which shows its own choice after every prefix: equal choices everywhere mean equal greedy
answers, by induction. The ``kimi`` form decodes along the same tokens and must give the same logits and
choices. A tie is a place where transformers' two best logits lie closer than the forms may differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from backend.engine.runner import ModelRunner
from backend.engine.step import ScheduledChunk, StepPlan
from embergate.layout import DataLayout
from tests.support.embedded_oracle import load_oracle

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_TOKENS = 200
MAX_LOGIT_ERROR = 1e-3
MAX_TIES = 2
BATCH = 4
BLOCKS_PER_SEQUENCE = 24

QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper.",
    "Explain photosynthesis to a child.",
    "List five uses for a paper clip.",
    "How do I make pancakes?",
    "Write a Python function that reverses a string.",
    "What is 17 plus 25? Show your steps.",
    "Summarise the plot of Romeo and Juliet.",
    "Give me three tips for learning a language.",
    "Why is the sky blue?",
    "Write a haiku about autumn rain.",
    "What are the planets of the solar system?",
    "Translate 'good morning' into Spanish and German.",
    "Describe how a bicycle stays upright.",
    "Draft an e-mail that asks for a day off.",
    "What is the difference between a virus and a bacterium?",
    "Who wrote Hamlet, and when?",
    "Name a healthy breakfast and say why it is healthy.",
    "Explain recursion with an example.",
    "What should I pack for a week in the mountains?",
)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@dataclass(frozen=True)
class Answer:
    """A prompt and the tokens that the ``llama`` form gave to it."""

    prompt: list[int]
    tokens: list[int]


@pytest.fixture(scope="module")
def models() -> Path:
    root = Path(os.environ.get("EMBERGATE_DATA_DIR", Path(__file__).parents[4] / ".embergate"))
    layout = DataLayout(root.resolve())
    assert layout.embedded_checkpoint("kimi").is_dir(), "the embedded model is not prepared: run `make model`"
    return layout.embedded_dir


@pytest.fixture(scope="module")
def oracle(models: Path) -> LlamaForCausalLM:
    return load_oracle(models / "llama")


@pytest.fixture
def load(load_runner: Callable[..., ModelRunner], models: Path) -> Callable[[str], ModelRunner]:
    return lambda form: load_runner(models / form, num_blocks=BATCH * BLOCKS_PER_SEQUENCE, threads=0)


@pytest.fixture(scope="module")
def prompts(models: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(models / "llama/tokenizer.json"))
    turns = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(turns.format(SYSTEM, question)).ids for question in QUESTIONS]


@pytest.mark.timeout(900)  # 20 prompts of 200 tokens in three models: minutes on a busy machine
def test_both_forms_give_the_greedy_answers_of_transformers(
    load: Callable[[str], ModelRunner], prompts: list[list[int]], oracle: LlamaForCausalLM
) -> None:
    llama, kimi = load("llama"), load("kimi")
    worst, ties, is_first = 0.0, {"llama": 0, "kimi": 0}, True
    for start in range(0, len(prompts), BATCH):
        answers = generate(llama, prompts[start : start + BATCH])
        expected = [read_by(oracle, answer) for answer in answers]
        for answer, logits in zip(answers, expected, strict=True):
            ties["llama"] += count_ties(torch.tensor(answer.tokens), logits)
        for step, logits in enumerate(decode_along(kimi, answers)):
            wanted = torch.stack([rows[step] for rows in expected])
            worst = max(worst, (logits - wanted).abs().max().item())
            ties["kimi"] += sum(
                count_ties(chosen[None], row[None])
                for chosen, row in zip(logits.argmax(1), wanted, strict=True)
            )
        if is_first:
            assert generate_by(oracle, answers[0].prompt) == answers[0].tokens
            is_first = False
    print(f"kimi against transformers: max|dlogit| {worst:.1e}; ties: {ties}")
    assert worst < MAX_LOGIT_ERROR
    assert max(ties.values()) <= MAX_TIES


def test_the_llama_form_has_the_same_bits_cold_chunked_warm_and_decoded(
    load: Callable[[str], ModelRunner], prompts: list[list[int]], sequencer: Any
) -> None:
    runner = load("llama")
    if not runner.info.is_native:
        pytest.skip("needs a C compiler: only the native kernels promise equal bits")
    ids = prompts[1]
    cold = sequencer(runner, ids, range(8)).compute(0, len(ids))
    assert torch.equal(sequencer(runner, ids, range(10, 18)).compute(0, 5, 6, 17, len(ids))[-1:], cold)
    assert torch.equal(sequencer(runner, ids, range(8)).compute(16, len(ids)), cold)
    decoded = sequencer(runner, ids, range(20, 28)).compute(*range(len(ids) + 1))
    assert torch.equal(decoded[-1:], cold)


def generate(runner: ModelRunner, prompts: list[list[int]]) -> list[Answer]:
    """Greedy answers of ``NUM_TOKENS`` tokens, decoded as one batch."""
    tables = [table_of(index) for index in range(len(prompts))]
    chunks = [ScheduledChunk(i, ids, 0, tables[i], True) for i, ids in enumerate(prompts)]
    tokens = runner.execute(StepPlan(tuple(chunks))).argmax(1, keepdim=True)
    while tokens.shape[1] < NUM_TOKENS:
        plan = StepPlan(
            tuple(
                ScheduledChunk(i, [int(tokens[i, -1])], len(ids) + tokens.shape[1] - 1, tables[i], True)
                for i, ids in enumerate(prompts)
            )
        )
        tokens = torch.cat((tokens, runner.execute(plan).argmax(1, keepdim=True)), dim=1)
    return [Answer(ids, row) for ids, row in zip(prompts, tokens.tolist(), strict=True)]


def decode_along(runner: ModelRunner, answers: list[Answer]) -> Iterator[Tensor]:
    """Logits ``[answers, vocab]`` for each token of the answers: the prompts as chunks, then decodes."""
    chunks = [ScheduledChunk(i, answer.prompt, 0, table_of(i), True) for i, answer in enumerate(answers)]
    yield runner.execute(StepPlan(tuple(chunks)))
    for step in range(NUM_TOKENS - 1):
        plan = StepPlan(
            tuple(
                ScheduledChunk(i, [answer.tokens[step]], len(answer.prompt) + step, table_of(i), True)
                for i, answer in enumerate(answers)
            )
        )
        yield runner.execute(plan)


def table_of(index: int) -> list[int]:
    return list(range(index * BLOCKS_PER_SEQUENCE, (index + 1) * BLOCKS_PER_SEQUENCE))


@torch.no_grad()
def read_by(oracle: LlamaForCausalLM, answer: Answer) -> Tensor:
    """transformers' logits ``[NUM_TOKENS, vocab]`` before each token of the answer."""
    ids = torch.tensor([answer.prompt + answer.tokens[:-1]])
    logits: Tensor = oracle(ids, logits_to_keep=NUM_TOKENS).logits[0]
    return logits


@torch.no_grad()
def generate_by(oracle: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=0,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=-1,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def count_ties(chosen: Tensor, logits: Tensor) -> int:
    """Places where ``chosen`` is not the best of ``logits``; each must be as good as the best."""
    best = logits.max(1).values
    gaps = best - logits.gather(1, chosen[:, None])[:, 0]
    assert gaps.max() < MAX_LOGIT_ERROR, f"another token was chosen with a gap of {gaps.max():.1e}"
    return int((gaps > 0).sum())
