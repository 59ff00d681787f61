"""From logits to one token per sequence.

Order of operations on a row: the mask of the sequence's grammar, logit bias, repetition penalty, frequency
and presence penalties, temperature, softmax, then min_p and top_k, then top_p over what they left. Reported
log probabilities are the log-softmax of the model's own logits, before any of this.

Randomness is counter-based: the draw for a token is a hash of the sequence's seed and the number of tokens it
has generated, so it does not depend on what else is in the batch, on preemption, or on earlier draws.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backend.engine.grammars import Compilation, GrammarError, GrammarPool, TokenGrammar
from backend.engine.messages import SamplingParams, SequenceRequest, TokenLogprobs
from backend.engine.sequence import Sequence

GREEDY_BELOW_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing by them says nothing more than the argmax does."""

CANDIDATE_RATIOS = (1e-3, 1e-6, 0.0)
"""Filters look at the tokens of at least this share of the likeliest one's probability: the first share that
is certain to hold all that can be drawn."""

RUN_TOKENS = 256
"""Neighbours summed together when the whole vocabulary can be drawn."""

Doubles = npt.NDArray[np.float64]

_BELOW_ONE = 1.0 - 2.0**-52
_COUNTER = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen for one row. ``is_usable`` is False when nothing can be: ``problem`` says why.

    ``is_last``: the sequence's grammar is complete with it.
    """

    token_id: int
    is_usable: bool
    logprobs: TokenLogprobs | None = None
    is_last: bool = False
    problem: str = "the model's output for this sequence is not a number"


def uniform(seed: int, counter: int) -> float:
    """A number in [0, 1), uniform over 2**52 values, that is a function of ``seed`` and ``counter`` alone."""
    digest = blake2b(_COUNTER.pack(seed & 0xFFFF_FFFF_FFFF_FFFF, counter), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 12) / (1 << 52)


class Sampler:
    """Samples for every running sequence; keeps what it must remember of each until :meth:`forget`.

    Args:
        draw_seed: a fresh seed for each sequence that brings none.
        grammars: of the model; None when no sequence has one.
    """

    def __init__(self, draw_seed: Callable[[], int], grammars: GrammarPool | None = None) -> None:
        self._draw_seed = draw_seed
        self._grammars = grammars
        self._rows: dict[int, _Row] = {}

    def expect(self, request: SequenceRequest) -> Compilation | None:
        """Prepare for a sequence that will be sampled for; what that takes time for, if anything."""
        if self._grammars is None or not request.sampling.grammar:
            return None
        return self._grammars.prepare(request.sampling.grammar)

    @torch.inference_mode()
    def sample(self, logits: Tensor, sequences: ListOf[Sequence]) -> list[Sampled]:
        """Choose the next token of each sequence.

        Args:
            logits: ``[len(sequences), vocab]`` float32; overwritten.
            sequences: whose rows these are, as they were when the step was planned.
        """
        rows = [self._rows.get(sequence.sequence_id) or self._remember(sequence) for sequence in sequences]
        if all(row.is_plain for row in rows):
            return _greedy(logits)
        report = _LogprobReport(logits, [row.sampling.num_logprobs for row in rows])
        problems = self._mask(logits, rows, sequences)
        for index, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
            if row.changes_logits:
                row.adjust(logits[index], sequence)
        sampled = _greedy(logits)
        drawing = [i for i, row in enumerate(rows) if not row.is_greedy and sampled[i].is_usable]
        if drawing:
            draws = [uniform(rows[i].seed, sequences[i].num_generated_tokens) for i in drawing]
            token_ids = _draw(
                logits if len(drawing) == len(rows) else logits[drawing],
                [rows[i].sampling for i in drawing],
                draws,
            )
            for i, token_id in zip(drawing, token_ids, strict=True):
                sampled[i] = Sampled(token_id, True)
        sampled = report.attach(sampled)
        for i, row in enumerate(rows):
            if row.grammar is not None or i in problems:
                sampled[i] = _follow(row.grammar, sampled[i], problems.get(i))
        return sampled

    def forget(self, sequence_id: int) -> None:
        """Drop what is remembered of a sequence that ended; does nothing when that is nothing."""
        self._rows.pop(sequence_id, None)

    @property
    def num_remembered(self) -> int:
        return len(self._rows)

    def _mask(self, logits: Tensor, rows: ListOf[_Row], sequences: ListOf[Sequence]) -> dict[int, str]:
        """Forbid what grammars do not allow; what is wrong with the rows where that is impossible."""
        problems: dict[int, str] = {}
        masked: list[int] = []
        for index, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
            if not row.sampling.grammar or self._grammars is None:
                continue
            try:
                if row.grammar is None:
                    row.grammar = self._grammars.new(row.sampling.grammar)
                row.grammar.follow(sequence)
                row.grammar.fill(self._grammars.mask(len(masked)))
            except GrammarError as error:
                problems[index] = str(error)
            else:
                masked.append(index)
        if self._grammars is not None:
            self._grammars.forbid(logits, masked)
        return problems

    def _remember(self, sequence: Sequence) -> _Row:
        row = _Row(sequence, self._draw_seed)
        self._rows[sequence.sequence_id] = row
        return row


class _Row:
    """What the sampler knows of one sequence, prepared once and then kept up to date token by token."""

    __slots__ = (
        "bias",
        "changes_logits",
        "generated",
        "grammar",
        "is_greedy",
        "is_plain",
        "num_counted",
        "sampling",
        "seed",
        "seen",
    )

    def __init__(self, sequence: Sequence, draw_seed: Callable[[], int]) -> None:
        sampling = sequence.sampling
        self.sampling = sampling
        self.is_greedy = sampling.temperature < GREEDY_BELOW_TEMPERATURE
        self.seed = draw_seed() if sampling.seed is None else sampling.seed
        has_penalty = sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
        self.seen = _Tally() if sampling.repetition_penalty != 1 else None
        self.generated = _Tally() if has_penalty else None
        self.bias: tuple[Tensor, Tensor] | None = None
        if sampling.logit_bias:
            self.bias = (
                torch.tensor(list(sampling.logit_bias), dtype=torch.int64),
                torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32),
            )
        self.changes_logits = self.bias is not None or has_penalty or self.seen is not None
        self.grammar: TokenGrammar | None = None
        self.is_plain = (
            self.is_greedy
            and not self.changes_logits
            and sampling.num_logprobs is None
            and not sampling.grammar
        )
        self.num_counted = sequence.num_prompt_tokens
        if self.seen is not None:
            self.seen.count(sequence.token_ids[: self.num_counted])

    def adjust(self, logits: Tensor, sequence: Sequence) -> None:
        """Apply bias and penalties to the row ``[vocab]`` in place; the work is per distinct token."""
        sampling = self.sampling
        new_token_ids = sequence.token_ids[self.num_counted :]
        self.num_counted += len(new_token_ids)
        if self.bias is not None:
            token_ids, bias = self.bias
            logits.index_add_(0, token_ids.to(logits.device), bias.to(logits.device))
        if self.seen is not None:
            self.seen.count(new_token_ids)
            token_ids, _ = self.seen.tensors(logits.device)
            values = logits[token_ids]
            penalty = sampling.repetition_penalty
            logits[token_ids] = torch.where(values > 0, values / penalty, values * penalty)
        if self.generated is not None:
            self.generated.count(new_token_ids)
            token_ids, counts = self.generated.tensors(logits.device)
            logits[token_ids] -= counts * sampling.frequency_penalty + sampling.presence_penalty


class _Tally:
    """How often each distinct token occurred: two growing arrays, changed one entry at a time."""

    __slots__ = ("_counts", "_ids", "_place_by_id")

    def __init__(self) -> None:
        self._place_by_id: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)

    def count(self, token_ids: ListOf[int]) -> None:
        places = self._place_by_id
        for token_id in token_ids:
            place = places.setdefault(token_id, len(places))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._counts[place] += 1

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The distinct token ids, int64, and their counts, float32, on ``device``."""
        num_distinct = len(self._place_by_id)
        ids, counts = self._ids[:num_distinct], self._counts[:num_distinct]
        return torch.from_numpy(ids).to(device), torch.from_numpy(counts).to(device)


def _follow(grammar: TokenGrammar | None, sampled: Sampled, problem: str | None) -> Sampled:
    """Go on in a grammar by what was sampled; whether that completes it."""
    if grammar is None or problem is not None:
        return Sampled(0, False, problem=problem or sampled.problem)
    if not sampled.is_usable:
        return sampled
    try:
        grammar.accept(sampled.token_id)
    except GrammarError as error:
        return Sampled(0, False, problem=str(error))
    return replace(sampled, is_last=grammar.is_complete)


class _LogprobReport:
    """Log probabilities of the model's own logits for the rows that asked, taken before the logits change."""

    def __init__(self, logits: Tensor, num_top: list[int | None]) -> None:
        self._num_top = num_top
        self._wanted = [index for index, count in enumerate(num_top) if count is not None]
        if self._wanted:
            self._logprobs = torch.log_softmax(logits[self._wanted], dim=-1)

    def attach(self, sampled: list[Sampled]) -> list[Sampled]:
        for place, index in enumerate(self._wanted):
            token_id = sampled[index].token_id
            row = self._logprobs[place]
            values, token_ids = row.topk(min(self._num_top[index] or 0, row.shape[0]))
            top = list(zip(token_ids.tolist(), values.tolist(), strict=True))
            logprobs = TokenLogprobs(token_id, float(row[token_id]), top)
            sampled[index] = Sampled(token_id, sampled[index].is_usable, logprobs)
        return sampled


def _greedy(logits: Tensor) -> list[Sampled]:
    """The likeliest token of each row. A maximum that is not finite (NaN wins it) makes the row unusable."""
    if logits.device.type == "cpu":
        # numpy's argmax is several times faster here than torch's.
        rows = logits.numpy()
        token_ids = rows.argmax(axis=-1)
        usable = np.isfinite(np.take_along_axis(rows, token_ids[:, None], axis=-1)[:, 0])
        return [Sampled(int(token_id), bool(ok)) for token_id, ok in zip(token_ids, usable, strict=True)]
    values, indices = logits.max(dim=-1)
    finite = values.isfinite().tolist()
    return [Sampled(token_id, ok) for token_id, ok in zip(indices.tolist(), finite, strict=True)]


def _draw(logits: Tensor, samplings: list[SamplingParams], draws: list[float]) -> list[int]:
    """Draw from ``[rows, vocab]`` logits by inverting each row's cumulative distribution at its draw."""
    temperatures = torch.tensor([s.temperature for s in samplings], dtype=torch.float32)
    probs = torch.softmax(logits / temperatures.to(logits.device).unsqueeze(1), dim=-1)
    is_filtered = [s.top_k > 0 or s.top_p < 1 or s.min_p > 0 for s in samplings]
    run_sums = None if all(is_filtered) else _sums_of_runs(probs)
    token_ids: list[int] = []
    for row, (sampling, draw) in enumerate(zip(samplings, draws, strict=True)):
        if run_sums is None or is_filtered[row]:
            token_ids.append(_draw_filtered(probs[row], sampling, draw))
        else:
            token_ids.append(_draw_unfiltered(probs[row], run_sums[row], draw))
    return token_ids


def _sums_of_runs(probs: Tensor) -> Doubles:
    """Per row of ``[rows, vocab]``, the sums of every ``RUN_TOKENS`` neighbours."""
    rows, vocab = probs.shape
    if vocab % RUN_TOKENS:
        probs = torch.nn.functional.pad(probs, (0, -vocab % RUN_TOKENS))
    return probs.view(rows, -1, RUN_TOKENS).sum(dim=-1).cpu().numpy().astype(np.float64)


def _draw_unfiltered(probs: Tensor, run_sums: Doubles, draw: float) -> int:
    """Find the run of neighbours that the draw falls into, then the token within it."""
    cumulative = run_sums.cumsum()
    point = draw * cumulative[-1]
    run = int(np.searchsorted(cumulative, point, side="right"))
    before = cumulative[run - 1] if run else 0.0
    share = min((point - before) / run_sums[run], _BELOW_ONE)
    first = run * RUN_TOKENS
    within = probs[first : first + RUN_TOKENS].cpu().numpy().astype(np.float64).cumsum()
    return first + int(np.searchsorted(within, share * within[-1], side="right"))


def _draw_filtered(probs: Tensor, sampling: SamplingParams, draw: float) -> int:
    """Draw one token of ``[vocab]`` probabilities under top_k, top_p and min_p."""
    vocab = probs.shape[0]
    top_k = sampling.top_k if 0 < sampling.top_k < vocab else vocab
    peak = float(probs.max())
    for ratio in CANDIDATE_RATIOS:
        token_ids, values = _likeliest(probs, ratio * peak)
        reaches_top_p = top_k == vocab and float(values.sum()) >= sampling.top_p
        if ratio <= sampling.min_p or len(values) >= top_k or reaches_top_p:
            break
    values = values[:top_k]
    values = values[values >= sampling.min_p * values[0]]
    cumulative = values.cumsum()
    is_all_mass = top_k == vocab and sampling.min_p <= 0
    limit = sampling.top_p * (1.0 if is_all_mass else cumulative[-1])
    num_kept = max(1, int(np.searchsorted(cumulative - values, limit, side="left")))
    chosen = np.searchsorted(cumulative[:num_kept], draw * cumulative[num_kept - 1], side="right")
    return int(token_ids[chosen])


def _likeliest(probs: Tensor, threshold: float) -> tuple[npt.NDArray[np.int64], Doubles]:
    """The tokens of at least ``threshold`` probability, likeliest first, ties in order of their ids."""
    if probs.device.type == "cpu":
        row = probs.numpy()
        token_ids = np.flatnonzero(row >= threshold)
        values = row[token_ids]
    else:
        indices = (probs >= threshold).nonzero()[:, 0]
        token_ids, values = indices.cpu().numpy(), probs[indices].cpu().numpy()
    order = np.argsort(-values, kind="stable")
    return token_ids[order], values[order].astype(np.float64)
