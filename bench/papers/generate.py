"""Generated traces: workloads of a known shape, for where a public trace is missing.

    python -m bench.papers.generate synthetic --requests 4000 --out trace.jsonl

Each workload is a mix of kinds of session. A session has a base (a document, a system
prompt, nothing) and turns; turn n's prompt is the base and all before it, so its leading
blocks are those of turn n-1. Where a base is shared, sessions share its blocks. Arrivals of
sessions are Poisson, or come in bursts (gamma), and turns follow after a think time.

`synthetic` imitates the lengths and reuse published for Mooncake's synthetic trace (a
third each of ShareGPT, L-Eval and LooGLE), `toolagent` and `conversation` those of the
traces of that name. They are imitations: a figure reproduced with one says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from random import Random

from bench.trace_file import write_trace
from conductor.replay.trace import DEFAULT_BLOCK_SIZE, Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class SessionKind:
    """One kind of session. Lengths are medians of lognormal distributions, in tokens."""

    share: float
    """Share of all sessions that are of this kind."""
    base_tokens: float
    base_spread: float
    """Standard deviation of the logarithm."""
    shared_bases: int
    """Bases that sessions of this kind choose from, the first most often; 0: each has its own."""
    turns: float
    """Mean, geometric."""
    turn_tokens: float
    output_tokens: float
    output_spread: float
    think_s: float
    """Mean seconds between turns, exponential."""
    keeps_history: bool = True
    """Whether a turn's prompt includes the turns before it; else only the base."""


WORKLOADS: dict[str, tuple[SessionKind, ...]] = {
    "conversation": (
        SessionKind(0.75, 4_500, 1.0, 0, 1.7, 900, 310, 0.6, 150.0),
        SessionKind(0.25, 10_500, 1.1, 0, 1.8, 1_500, 310, 0.6, 150.0),
    ),
    "synthetic": (
        SessionKind(0.36, 500, 0.8, 0, 4.0, 500, 280, 0.6, 200.0),
        SessionKind(0.32, 13_500, 0.5, 0, 3.9, 150, 50, 0.7, 180.0, keeps_history=False),
        SessionKind(0.32, 24_000, 0.6, 0, 3.9, 150, 40, 0.7, 180.0, keeps_history=False),
    ),
    "toolagent": (
        SessionKind(0.55, 6_144, 0.0, 3, 1.0, 800, 30, 0.8, 5.0),
        SessionKind(0.15, 2_560, 0.0, 3, 1.0, 600, 20, 0.3, 5.0),
        SessionKind(0.30, 5_000, 1.0, 0, 2.0, 900, 250, 0.7, 150.0),
    ),
}


def generate(workload: str, num_requests: int, rate: float, seed: int, burstiness: float = 1.0) -> Trace:
    """Return a trace of a named workload.

    Args:
        workload: One of WORKLOADS.
        num_requests: Rows.
        rate: Mean requests a second.
        seed: The same seed gives the same trace.
        burstiness: Shape of the gamma distribution of the gaps between sessions; 1: Poisson, less: bursts.
    """
    rng = Random(f"{workload} {seed}")
    kinds = WORKLOADS[workload]
    maker = _Maker(rng, DEFAULT_BLOCK_SIZE)
    mean_turns = sum(kind.share * kind.turns for kind in kinds) / sum(kind.share for kind in kinds)
    rows: list[TraceRequest] = []
    now_s = 0.0
    # half as many again, so that sessions begun early do not thin out towards the end
    while len(rows) < num_requests * 1.5:
        if burstiness == 1.0:
            now_s += rng.expovariate(rate / mean_turns)
        else:
            now_s += rng.gammavariate(burstiness, mean_turns / rate / burstiness)
        kind = rng.choices(kinds, [kind.share for kind in kinds])[0]
        rows.extend(maker.session(kind, now_s))
    rows.sort(key=lambda row: row.arrival_s)
    del rows[num_requests:]
    # turns that fall after the end are cut off, so the rate is set here, exactly
    first_s, stretch = rows[0].arrival_s, num_requests / rate / (rows[-1].arrival_s - rows[0].arrival_s)
    rows = [row._replace(arrival_s=(row.arrival_s - first_s) * stretch) for row in rows]
    return Trace(f"{workload} (generated)", DEFAULT_BLOCK_SIZE, rows)


class _Maker:
    """Makes sessions, and the ids of their blocks."""

    def __init__(self, rng: Random, block_size: int) -> None:
        self._rng = rng
        self._block_size = block_size
        self._next_id = 1
        self._shared: dict[tuple[SessionKind, int], tuple[int, list[int]]] = {}

    def session(self, kind: SessionKind, started_s: float) -> list[TraceRequest]:
        rng, size = self._rng, self._block_size
        tokens, full_blocks = self._base(kind)
        rows: list[TraceRequest] = []
        now_s = started_s
        last_turn = False
        while not last_turn:
            prompt = tokens + self._length(kind.turn_tokens, 0.7)
            # block 0 is everybody's, as a system prompt is
            chain = [0, *full_blocks]
            chain += [self._new_id() for _ in range(-(-prompt // size) - len(chain))]
            output = min(2_000, self._length(kind.output_tokens, kind.output_spread))
            rows.append(TraceRequest(now_s, prompt, output, chain))
            if kind.keeps_history:
                tokens = prompt + output
                full_blocks = chain[1 : prompt // size]
            now_s += rng.expovariate(1.0 / kind.think_s)
            last_turn = rng.random() < 1.0 / kind.turns or tokens > 120_000
        return rows

    def _base(self, kind: SessionKind) -> tuple[int, list[int]]:
        """Return a base's tokens and the ids of its full blocks after the first."""
        if not kind.shared_bases:
            return self._new_base(kind)
        # the first base is twice as frequent as the second, and so on
        which = min(kind.shared_bases - 1, int(-log(max(1e-9, self._rng.random()), 2)))
        key = (kind, which)
        if key not in self._shared:
            self._shared[key] = self._new_base(kind)
        return self._shared[key]

    def _new_base(self, kind: SessionKind) -> tuple[int, list[int]]:
        tokens = min(120_000, self._length(kind.base_tokens, kind.base_spread))
        return tokens, [self._new_id() for _ in range(max(0, tokens // self._block_size - 1))]

    def _length(self, median: float, spread: float) -> int:
        return max(1, round(median * exp(self._rng.gauss(0.0, spread))))

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Write a generated trace."""
    parser = argparse.ArgumentParser(description="Write a generated trace.")
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--requests", type=int, default=4_000)
    parser.add_argument("--rate", type=float, default=3.9, help="mean requests a second")
    parser.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; less: bursts; more: even")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help=".jsonl or .jsonl.gz")
    args = parser.parse_args(argv)
    if args.burstiness <= 0:
        parser.error("--burstiness: more than 0")
    trace = generate(args.workload, args.requests, args.rate, args.seed, args.burstiness)
    write_trace(trace, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
