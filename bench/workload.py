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
from typing import overload

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
    forks: tuple[LoadRequest, ...] = ()
    """What is asked beside the session from then on, by a subagent each; `at_s` as of `next_turn`."""
    keeps_answer: bool = False
    """Whether the next turn's prompt begins with this prompt and the answer that it had: what `token_ids` of
    the next turn has there are stand-ins."""


class RebuiltPrompt(Sequence[int]):
    """The tokens of a trace's prompt, made from its ids when they are wanted: a trace has billions."""

    __slots__ = ("_chain", "_length", "_stride")

    def __init__(self, chain: Sequence[int], num_tokens: int, stride: int) -> None:
        self._chain = chain
        self._length = num_tokens
        self._stride = stride

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        return list(self)[at]

    def __iter__(self) -> Iterator[int]:
        left = self._length
        for block in self._chain:
            yield from _block(block, self._stride)[:left]
            left -= self._stride
            if left <= 0:
                return


def num_turns(request: LoadRequest) -> int:
    """Return how many requests a session has, with what forks from it."""
    waiting, count = [request], 0
    while waiting:
        each: LoadRequest | None = waiting.pop()
        while each is not None:
            count += 1
            waiting.extend(each.forks)
            each = each.next_turn
    return count


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

    A turn's prompt is the one before it, its answer, and as many new ones as the first prompt had. The
    answer's own tokens are not known here: stand-ins have their places.

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
            turn = LoadRequest(think_s, prompt, first.output_tokens, turn, keeps_answer=True)
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
    trace: Trace,
    speed: float,
    limit: int | None,
    block_tokens: int | None,
    session_rate: float | None = None,
    seed: int = 0,
) -> Iterator[LoadRequest]:
    """Yield a trace's requests, at their times, with their shared prefixes.

    Args:
        speed: Times are divided by it.
        limit: Of the trace's first requests; None: all.
        block_tokens: Tokens for each id, instead of the trace's: a small model on a small
            machine can be given the same sharing at a fraction of the length.
        session_rate: Sessions begin so often a second; None: when the trace says.
        seed: Of that.
    """
    for first in arrivals(trace, speed, 1, 0.0, limit, seed, session_rate):
        yield _rebuilt_session(first, trace, block_tokens or trace.block_size)


def _rebuilt_session(first: TraceRequest, trace: Trace, stride: int) -> LoadRequest:
    turn: LoadRequest | None = None
    for row in reversed(turns_of(first)):
        last = row.num_tokens - (len(row.chain) - 1) * trace.block_size
        num_tokens = (len(row.chain) - 1) * stride + max(1, last * stride // trace.block_size)
        turn = LoadRequest(
            row.arrival_s,
            RebuiltPrompt(row.chain, num_tokens, stride),
            max(1, row.output_tokens * stride // trace.block_size),
            turn,
            tuple(_rebuilt_session(fork, trace, stride) for fork in row.forks),
            # its prompts begin with the prompt before them and its answer
            trace.format == "aiperf",
        )
    assert turn is not None
    return turn


@lru_cache(maxsize=4096)
def _block(block: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(Random(block).choices(TOKEN_IDS, k=num_tokens))
