"""From logits to one token per sequence.

Order of operations on a row: logit bias, repetition penalty, frequency and presence penalties, temperature,
softmax, then min_p and top_k, then top_p over what they left. Reported log probabilities are the log-softmax
of the model's own logits, before any of this.

Randomness is counter-based: the draw for a token is a hash of the sequence's seed and the number of tokens it
has generated, so it does not depend on what else is in the batch, on preemption, or on earlier draws.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from backend.engine.messages import SamplingParams, TokenLogprobs
from backend.engine.sequence import Sequence

GREEDY_BELOW_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing by them says nothing more than the argmax does."""

NUM_CANDIDATES = 512
"""Likeliest tokens that top_p and min_p look at before a full sort is needed."""

_COUNTER = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen for one row. ``is_usable`` is False when its logits have no finite maximum."""

    token_id: int
    is_usable: bool
    logprobs: TokenLogprobs | None = None


def uniform(seed: int, counter: int) -> float:
    """A number in [0, 1), uniform over 2**52 values, that is a function of ``seed`` and ``counter`` alone."""
    digest = blake2b(_COUNTER.pack(seed & 0xFFFF_FFFF_FFFF_FFFF, counter), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 12) / (1 << 52)


class Sampler:
    """Samples for every running sequence; keeps what it must remember of each until :meth:`forget`."""

    def __init__(self, draw_seed: Callable[[], int]) -> None:
        self._draw_seed = draw_seed
        self._rows: dict[int, _Row] = {}

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
        for index, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
            if row.changes_logits:
                row.adjust(logits[index], sequence)
        sampled = _greedy(logits)
        drawing = [i for i, row in enumerate(rows) if not row.is_greedy and sampled[i].is_usable]
        if drawing:
            draws = [uniform(rows[i].seed, sequences[i].num_generated_tokens) for i in drawing]
            token_ids = _draw(logits[drawing], [rows[i].sampling for i in drawing], draws)
            for i, token_id in zip(drawing, token_ids, strict=True):
                sampled[i] = Sampled(token_id, True)
        return report.attach(sampled)

    def forget(self, sequence_id: int) -> None:
        """Drop what is remembered of a sequence that ended; does nothing when that is nothing."""
        self._rows.pop(sequence_id, None)

    @property
    def num_remembered(self) -> int:
        return len(self._rows)

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
        self.is_plain = self.is_greedy and not self.changes_logits and sampling.num_logprobs is None
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
    """How often each distinct token occurred: two growing tensors, changed one entry at a time."""

    __slots__ = ("_counts", "_ids", "_place_by_id")

    def __init__(self) -> None:
        self._place_by_id: dict[int, int] = {}
        self._ids = torch.zeros(64, dtype=torch.int64)
        self._counts = torch.zeros(64, dtype=torch.float32)

    def count(self, token_ids: ListOf[int]) -> None:
        for token_id in token_ids:
            place = self._place_by_id.setdefault(token_id, len(self._place_by_id))
            if place == len(self._ids):
                self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)])
                self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._counts[place] += 1

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The distinct token ids, int64, and their counts, float32, on ``device``."""
        num_distinct = len(self._place_by_id)
        return self._ids[:num_distinct].to(device), self._counts[:num_distinct].to(device)


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
    values, token_ids = logits.max(dim=-1)
    usable = values.isfinite().tolist()
    return [Sampled(token_id, ok) for token_id, ok in zip(token_ids.tolist(), usable, strict=True)]


def _draw(logits: Tensor, samplings: list[SamplingParams], draws: list[float]) -> list[int]:
    """Draw from ``[rows, vocab]`` logits by inverting the cumulative distribution at ``draws``."""
    device = logits.device
    temperatures = torch.tensor([s.temperature for s in samplings], dtype=torch.float32, device=device)
    probs = torch.softmax(logits / temperatures.unsqueeze(1), dim=-1)
    token_ids = [0] * len(samplings)
    unfiltered = [i for i, s in enumerate(samplings) if s.top_k <= 0 and s.top_p >= 1 and s.min_p <= 0]
    if unfiltered:
        cumulative = probs[unfiltered].cumsum(dim=-1, dtype=torch.float64)
        points = torch.tensor([[draws[i]] for i in unfiltered], dtype=torch.float64, device=device)
        chosen = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)
        for i, token_id in zip(unfiltered, chosen[:, 0].tolist(), strict=True):
            token_ids[i] = token_id
    for i in set(range(len(samplings))).difference(unfiltered):
        token_ids[i] = _draw_filtered(probs[i], samplings[i], draws[i])
    return token_ids


def _draw_filtered(probs: Tensor, sampling: SamplingParams, draw: float) -> int:
    """Draw one token of ``[vocab]`` probabilities under top_k, top_p and min_p."""
    vocab = probs.shape[0]
    top_k = sampling.top_k if 0 < sampling.top_k < vocab else vocab
    num_candidates = min(top_k, NUM_CANDIDATES)
    values, token_ids = probs.topk(num_candidates)
    if num_candidates < top_k and not _lies_within(values, sampling, has_top_k=top_k < vocab):
        values, token_ids = probs.topk(top_k)
    values = values.to(torch.float64)
    values = torch.where(values >= sampling.min_p * values[0], values, 0.0)
    cumulative = values.cumsum(dim=0)
    is_all_mass = top_k == vocab and sampling.min_p <= 0
    total = 1.0 if is_all_mass else float(cumulative[-1])
    is_kept = cumulative - values < sampling.top_p * total
    is_kept[0] = True
    cumulative = torch.where(is_kept, values, 0.0).cumsum(dim=0)
    chosen = int(torch.searchsorted(cumulative, cumulative[-1] * draw, right=True))
    return int(token_ids[chosen])


def _lies_within(values: Tensor, sampling: SamplingParams, *, has_top_k: bool) -> bool:
    """Whether the likeliest tokens' ``values`` (falling) hold everything that can be drawn."""
    if sampling.min_p > 0:
        return bool(values[-1] < sampling.min_p * values[0])
    return not has_top_k and bool(values.sum(dtype=torch.float64) >= sampling.top_p)
