"""Sampler: logits to token ids, for a whole batch at once.

The order is fixed: penalties, logit bias, what a grammar allows or stop tokens held back by `min_tokens`,
temperature, min-p, top-k, top-p, draw. Log probabilities are those of the model, before all that, as OpenAI's
are. Work that no sequence of the batch asks for is not done; a greedy batch is one argmax.

The draw divides each probability by exponential noise of its own and takes the largest (the Gumbel-max
trick). The noise is a pure function of (seed, position), on one kind of device: a sequence that is preempted,
or goes on on another node, draws what it would have drawn. The inverse of the cumulative distribution was
weighed: logits differ in their last bits with the size of the batch, and of 49,000 tokens at a high
temperature each is so narrow that such a bit moves the draw to a neighbour. Here it decides only between two
tokens that close to equal.

A GPU draws in `kernels/sample_rows.py`; from this file it takes what comes before, and the log probabilities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Rows

import torch

from base.request import SampledToken, SamplingParams, TokenLogprobs
from engine.sequence import Sequence, has_penalty

MASK_64 = (1 << 64) - 1

CANDIDATES = 1024
"""Number of most likely tokens among which top-p is looked for first.

Sorting a whole vocabulary costs 12 ms a row on a CPU, as much as the model."""

GREEDY_BELOW = 1e-4
"""A temperature under which only the best token is left, and logits over it overflow."""


@torch.inference_mode()
def sample(
    logits: torch.Tensor, sequences: Rows[Sequence], masks: torch.Tensor | None = None
) -> list[SampledToken]:
    """Return the next token of each sequence from logits [num_seqs, vocab_size], which are not changed.

    `masks` are of those of the sequences that have a constraint, as `TokenMasks.begin` returns them."""
    if not sequences:
        return []
    logits = logits.float()
    params = [sequence.sampling for sequence in sequences]
    shaped = shape_logits(logits, sequences)
    if masks is not None:
        rows = [row for row, sequence in enumerate(sequences) if sequence.constraint is not None]
        shaped = logits.clone() if shaped is logits else shaped
        mask_logits(shaped, rows, masks.to(logits.device))
    token_ids = _choose(shaped, params, [item.num_tokens for item in sequences])
    # The host waits for the device here: the tokens are what the step is for.
    chosen: list[int] = token_ids.tolist()
    logprobs = logprobs_of(logits, token_ids, sequences)
    return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(chosen)]


def needs_logits(sequence: Sequence) -> bool:
    """Return whether a sequence asks for more than a draw from the logits as they are."""
    return sequence.needs_history or bool(sequence.sampling.logit_bias)


def noise_seed(seed: int, position: int) -> int:
    """Return the 64 bits that the noise of one position of a sequence is made from.

    SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014) by position."""
    state = _mix64((seed & MASK_64) ^ 0x9E3779B97F4A7C15)
    return _mix64(state + position * 0x9E3779B97F4A7C15)


def _mix64(value: int) -> int:
    value &= MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def shape_logits(logits: torch.Tensor, sequences: Rows[Sequence]) -> torch.Tensor:
    """Return the logits after penalties, bias and held-back stop tokens; a copy if any applies."""
    shaped = logits
    for row, sequence in enumerate(sequences):
        held_back = _held_back(sequence)
        if not (has_penalty(sequence.sampling) or sequence.sampling.logit_bias or held_back):
            continue
        shaped = logits.clone() if shaped is logits else shaped
        _penalise(shaped[row], sequence)
        if sequence.sampling.logit_bias:
            ids, values = zip(*sequence.sampling.logit_bias, strict=True)
            shaped[row, list(ids)] += torch.tensor(values, dtype=shaped.dtype, device=shaped.device)
        if held_back:
            shaped[row, held_back] = float("-inf")
    return shaped


def mask_logits(logits: torch.Tensor, rows: Rows[int], masks: torch.Tensor) -> None:
    """Give minus infinity to what the masks, int32 [len(rows), words], do not allow in those rows."""
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    for row, mask in zip(rows, masks, strict=True):
        allowed = (mask[:, None] >> bits & 1).view(-1)[: logits.shape[1]]
        logits[row].masked_fill_(allowed == 0, float("-inf"))


def _held_back(sequence: Sequence) -> list[int]:
    """Return the stop tokens that may not be sampled yet; a grammar's mask holds them back itself."""
    if sequence.constraint is not None or sequence.num_generated_tokens >= sequence.stop.min_tokens:
        return []
    return list(sequence.stop.stop_token_ids)


def _penalise(logits: torch.Tensor, sequence: Sequence) -> None:
    """Apply penalties to one row in place: repetition to all tokens, the others to generated ones."""
    sampling = sequence.sampling
    if sampling.repetition_penalty != 1.0:
        seen = _ids(set(sequence.token_ids), logits)
        scores = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    generated = Counter(sequence.token_ids[sequence.num_prompt_tokens :])
    if generated and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = torch.tensor(list(generated.values()), dtype=logits.dtype, device=logits.device)
        logits[_ids(generated, logits)] -= sampling.presence_penalty + sampling.frequency_penalty * counts


def _ids(token_ids: Iterable[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=like.device)


def _choose(logits: torch.Tensor, params: Rows[SamplingParams], positions: Rows[int]) -> torch.Tensor:
    """Return [num_seqs] token ids."""
    # The first of equal maxima, so the lowest id.
    greedy = logits.argmax(dim=-1)
    drawn = [row for row, sampling in enumerate(params) if sampling.temperature > GREEDY_BELOW]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        seeds = [noise_seed(params[row].seed, positions[row]) for row in drawn]
        greedy[rows] = _draw(logits[rows], [params[row] for row in drawn], seeds)
    return greedy


def _draw(logits: torch.Tensor, params: list[SamplingParams], seeds: list[int]) -> torch.Tensor:
    """Return one token of each row by its own distribution and noise."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    probs = (logits / column([item.temperature for item in params]).float()).softmax(-1)
    if any(item.min_p > 0 for item in params):
        floor = column([item.min_p for item in params]).float() * probs.amax(-1, keepdim=True)
        probs = probs.masked_fill(probs < floor, 0.0)
    if truncated := [row for row, item in enumerate(params) if item.top_k > 0 or item.top_p < 1]:
        probs[truncated] = _truncate(probs[truncated], [params[row] for row in truncated])
    noise = torch.empty_like(probs)
    generator = torch.Generator(device=probs.device)
    for row, seed in enumerate(seeds):
        generator.manual_seed(seed - (1 << 63))  # torch takes signed ones
        noise[row].exponential_(generator=generator)
    return (probs / noise).argmax(dim=-1)


def _truncate(probs: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Return the probabilities with those outside top-k, then top-p, 0; the order stays that of ids.

    Each row is cut at a value, so that equals are kept or dropped together, whatever order a sort gives them.
    """
    vocab_size = probs.shape[-1]
    limits = torch.tensor(
        [item.top_k if item.top_k > 0 else vocab_size for item in params], device=probs.device
    )
    limits = limits.clamp_(max=vocab_size)[:, None]
    top_p = torch.tensor([item.top_p for item in params], dtype=torch.float64, device=probs.device)[:, None]
    widest = max(item.top_k for item in params)
    for width in (min(max(CANDIDATES, widest), vocab_size), vocab_size):
        highest = probs.topk(width, dim=-1).values
        highest.masked_fill_(torch.arange(width, device=probs.device) >= limits, 0.0)
        cumulative = highest.double().cumsum(-1)
        total = torch.where(limits < vocab_size, cumulative[:, -1:], probs.double().sum(-1, keepdim=True))
        # The host waits for the device here, to sort the vocabulary only when it must.
        if bool((cumulative[:, -1:] >= top_p * total).all()):
            break
    # Kept while the probability before a token is under top_p of what is left.
    kept = (cumulative - highest < top_p * total) & (highest > 0)
    last = kept.sum(-1, keepdim=True).clamp_(min=1) - 1
    return probs.masked_fill(probs < highest.gather(-1, last), 0.0)


def logprobs_of(
    logits: torch.Tensor, token_ids: torch.Tensor, sequences: Rows[Sequence]
) -> dict[int, TokenLogprobs]:
    """Return the log probabilities of the rows that ask for them."""
    wanted = [row for row, sequence in enumerate(sequences) if sequence.num_logprobs is not None]
    if not wanted:
        return {}
    rows = torch.tensor(wanted, device=logits.device)
    logprobs = logits[rows].log_softmax(-1)
    chosen = logprobs.gather(-1, token_ids[rows, None])[:, 0].tolist()
    top = logprobs.topk(max(sequences[row].num_logprobs or 0 for row in wanted), dim=-1)
    values, ids = top.values.tolist(), top.indices.tolist()
    result = {}
    for index, row in enumerate(wanted):
        count = sequences[row].num_logprobs or 0
        pairs = tuple(zip(ids[index][:count], values[index][:count], strict=True))
        result[row] = TokenLogprobs(chosen[index], pairs)
    return result
