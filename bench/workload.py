"""What a load is made of: when each request comes, its prompt, and how long its answer shall be.

Pure and seeded: the same arguments make the same load, to the token. Arrivals are drawn from a
gamma distribution (shape 1 is Poisson; below 1 comes in bursts), or taken from a trace with its
timestamps. A trace's prompts are rebuilt from its `hash_ids`: an id always becomes the same
tokens, so that prompts share exactly the prefixes that they shared when the trace was taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

from conductor.replay.trace import Trace, TraceRequest, arrivals
from conductor.replay.trace import turns as turns_of

TOKEN_IDS = range(1000, 20000)
"""Ordinary tokens of every vocabulary in use: special ones have the lowest or highest ids."""


TICK_S = 3.0


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request to send."""

    at_s: float
    """Seconds after the load's start."""
    token_ids: Sequence[int]
    output_tokens: int
    next_turn: LoadRequest | None = None
    """What its session asks next; its `at_s` counts from the end of this answer."""


def num_turns(request: LoadRequest | None) -> int:
    """Return how many requests a session has."""
    return 0 if request is None else 1 + num_turns(request.next_turn)


def gamma_arrivals(rate: float, burstiness: float, rng: Random) -> Iterator[float]:
    """Yield arrival times of `rate` requests a second in the mean; all at 0 if that is infinite.

    Args:
        burstiness: The gamma distribution's shape: 1 is Poisson, less is burstier, more is
            more even.
    """
    at_s = 0.0
    while True:
        yield at_s
        if rate != float("inf"):
            at_s += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))


def synthetic_load(
    num_requests: int,
    times_s: Iterator[float],
    input_tokens: int,
    output_tokens: int,
    shared_prefix_tokens: int,
    rng: Random,
) -> Iterator[LoadRequest]:
    """Yield requests of one length, which all begin with the same tokens.

    Args:
        input_tokens: Of one prompt, the shared prefix included.
    """
    prefix = rng.choices(TOKEN_IDS, k=shared_prefix_tokens)
    for _ in range(num_requests):
        own = rng.choices(TOKEN_IDS, k=input_tokens - shared_prefix_tokens)
        yield LoadRequest(next(times_s), [*prefix, *own], output_tokens)


def sessions(load: Iterator[LoadRequest], turns: int, think_s: float, rng: Random) -> Iterator[LoadRequest]:
    """Yield each request of `load` as the first of a session.

    A turn's prompt is the one before it, as many tokens as its answer had, and as many new ones as
    the first prompt had. The answer's own tokens are not known here: their stand-ins match no cache.

    Args:
        turns: Of each session.
        think_s: From an answer to the next turn.
    """
    for first in load:
        grown = len(first.token_ids) + first.output_tokens
        prompts = [list(first.token_ids)]
        for _ in range(turns - 1):
            prompts.append([*prompts[-1], *rng.choices(TOKEN_IDS, k=grown)])
        turn: LoadRequest | None = None
        for prompt in reversed(prompts):
            turn = LoadRequest(think_s, prompt, first.output_tokens, turn)
        assert turn is not None
        yield replace(turn, at_s=first.at_s)


def trace_at(trace: Trace, rate: float, num_requests: int, max_tokens: int, copy: int) -> Trace:
    """Return a trace's first requests at `rate` a second in the mean.

    Arrivals are spread within `TICK_S`, in which the public conversation trace counts: its users did
    not ask ten at a time.

    Args:
        max_tokens: Longer prompts are cut to it.
        copy: Of another number no prompt shares a prefix: no cache of an earlier run helps.

    Raises:
        ValueError: the trace has sessions, whose later turns come when they come.
    """
    first = trace.requests[:num_requests]
    if any(row.next_turn is not None for row in first):
        raise ValueError(f"{trace.name}: a trace of sessions has no rate; give one without session_id")
    offset = copy * (1 + max((block for row in first for block in row.chain), default=0))
    num_blocks = -(-max_tokens // trace.block_size)
    cut = [
        row._replace(
            num_tokens=min(row.num_tokens, max_tokens),
            chain=tuple(block + offset for block in row.chain[:num_blocks]),
        )
        for row in first
    ]
    span_s = TICK_S + first[-1].arrival_s - first[0].arrival_s
    speed = rate * span_s / len(first)
    rows = arrivals(replace(trace, requests=cut), speed, scale=1, jitter_s=TICK_S, limit=None, seed=copy)
    return replace(trace, requests=list(rows))


def trace_load(
    trace: Trace, speed: float, limit: int | None, block_tokens: int | None
) -> Iterator[LoadRequest]:
    """Yield a trace's requests, at their times, with their shared prefixes.

    Args:
        speed: Times are divided by it.
        limit: Of the trace's first requests; None: all.
        block_tokens: Tokens for each id, instead of the trace's: a small model on a small
            machine can be given the same sharing at a fraction of the length.
    """
    stride = block_tokens or trace.block_size
    for first in arrivals(trace, speed, scale=1, jitter_s=0.0, limit=limit, seed=0):
        turn: LoadRequest | None = None
        for row in reversed(turns_of(first)):
            turn = _rebuilt(row, trace.block_size, stride, turn)
        assert turn is not None
        yield turn


def _rebuilt(row: TraceRequest, block_size: int, stride: int, following: LoadRequest | None) -> LoadRequest:
    last = row.num_tokens - (len(row.chain) - 1) * block_size
    num_tokens = (len(row.chain) - 1) * stride + max(1, last * stride // block_size)
    token_ids = [token for block in row.chain for token in _block(block, stride)][:num_tokens]
    output_tokens = max(1, row.output_tokens * stride // block_size)
    return LoadRequest(row.arrival_s, token_ids, output_tokens, following)


@lru_cache(maxsize=4096)
def _block(block: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(Random(block).choices(TOKEN_IDS, k=num_tokens))
