"""Generated workloads of regimes: agents whose prompts grow, and mixes that a single parameter bends.

An agent's session has a system prompt that sessions of its kind share, and turns: each prompt is the one
before, its answer, and what a tool or a user adds. In a closed loop a turn comes so long after the answer
before it; in an open loop its moment is fixed. Everything is drawn from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from random import Random

from conductor.replay.trace import DEFAULT_BLOCK_SIZE, Trace, TraceRequest, linked


@dataclass(frozen=True, slots=True)
class AgentKind:
    """The sessions of agents. Lengths are medians of lognormal distributions, in tokens."""

    first_tokens: float = 8_000
    turn_tokens: float = 1_200
    output_tokens: float = 250
    spread: float = 0.8
    turns: float = 12.0
    """Mean, geometric."""
    think_s: float = 10.0
    """Mean seconds between an answer and the next turn, exponential."""
    system_tokens: int = 3_072
    num_systems: int = 4
    most_tokens: int = 100_000
    answer_s: float = 3.0
    """What an open loop takes an answer to last."""


def agents(kind: AgentKind, num_requests: int, rate: float, seed: int, is_closed: bool) -> Trace:
    """Return sessions that begin at `rate` a second, until there are `num_requests` turns."""
    rng = Random(f"agents {seed}")
    next_id = 1 + kind.num_systems * (kind.system_tokens // DEFAULT_BLOCK_SIZE)
    rows: list[TraceRequest] = []
    now_s, made = 0.0, 0
    while made < num_requests:
        now_s += rng.expovariate(rate)
        turns, next_id = _turns(kind, rng, next_id)
        made += len(turns)
        if is_closed:
            rows.append(linked(turns)._replace(arrival_s=now_s))
        else:
            moment_s = now_s
            for number, turn in enumerate(turns):
                moment_s += turn.arrival_s + kind.answer_s if number else 0.0
                rows.append(turn._replace(arrival_s=moment_s))
    rows.sort(key=lambda row: row.arrival_s)
    return Trace("agents (generated)", DEFAULT_BLOCK_SIZE, rows)


def _turns(kind: AgentKind, rng: Random, next_id: int) -> tuple[list[TraceRequest], int]:
    """Return the turns of one session, each at its seconds after the answer before, and the next free id."""
    size = DEFAULT_BLOCK_SIZE
    system_blocks = kind.system_tokens // size
    system = rng.randrange(kind.num_systems)
    full = list(range(1 + system * system_blocks, 1 + (system + 1) * system_blocks))
    tokens = system_blocks * size
    added = _length(rng, kind.first_tokens, kind.spread)
    turns: list[TraceRequest] = []
    while True:
        prompt = tokens + added
        chain = list(full)
        while len(chain) < -(-prompt // size):
            chain.append(next_id)
            next_id += 1
        output = min(2_000, _length(rng, kind.output_tokens, kind.spread))
        turns.append(TraceRequest(rng.expovariate(1 / kind.think_s), prompt, output, chain))
        tokens, full = prompt + output, chain[: prompt // size]
        added = _length(rng, kind.turn_tokens, kind.spread)
        if rng.random() < 1 / kind.turns or tokens + added > kind.most_tokens:
            return turns, next_id


@dataclass(frozen=True, slots=True)
class MixKind:
    """Requests that share little. Lengths are medians of lognormal distributions, in tokens."""

    prompt_tokens: float
    output_tokens: float
    prompt_spread: float = 0.8
    output_spread: float = 0.6
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps; 1: Poisson, less: bursts."""
    shared_share: float = 0.0
    """Share of the requests that begin with one of `num_shared` documents."""
    num_shared: int = 20
    shared_tokens: int = 8_192
    most_output_tokens: int = 2_000


def mix(kind: MixKind, num_requests: int, rate: float, seed: int) -> Trace:
    """Return requests at `rate` a second."""
    rng, size = Random(f"mix {seed}"), DEFAULT_BLOCK_SIZE
    shared_blocks = kind.shared_tokens // size
    next_id = 1 + kind.num_shared * shared_blocks
    rows: list[TraceRequest] = []
    now_s = 0.0
    for _ in range(num_requests):
        now_s += rng.gammavariate(kind.burstiness, 1 / rate / kind.burstiness)
        chain: list[int] = [0]
        prompt = _length(rng, kind.prompt_tokens, kind.prompt_spread)
        if rng.random() < kind.shared_share:
            # the first document is asked about most
            document = min(kind.num_shared - 1, int(rng.paretovariate(0.7)) - 1)
            chain = list(range(1 + document * shared_blocks, 1 + (document + 1) * shared_blocks))
            prompt += shared_blocks * size
        while len(chain) < -(-prompt // size):
            chain.append(next_id)
            next_id += 1
        output = min(kind.most_output_tokens, _length(rng, kind.output_tokens, kind.output_spread))
        rows.append(TraceRequest(now_s, prompt, output, chain[: -(-prompt // size)]))
    return Trace("mix (generated)", size, rows)


def _length(rng: Random, median: float, spread: float) -> int:
    return max(1, min(120_000, round(median * exp(rng.gauss(0.0, spread)))))
