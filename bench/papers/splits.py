"""How nodes are set, of which `conductor advise` asks beside their number: their split, and tokens of a step.

Where roles are fixed the best split is climbed to, from halves on, by steps that halve; where they follow
the load a split is how nodes begin, and halves will do. Two settings are tied where neither serves more of
the same requests by two standard errors of how many more those are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, sqrt
from typing import NamedTuple

from conductor.placing.profile import Profile
from conductor.replay.arguments import Nodes
from conductor.replay.cluster_options import default_chunk_tokens

NEAR = 3
"""Nodes more or less of a role, up to which splits are said to be tied."""


class Case(NamedTuple):
    """What is replayed."""

    nodes: Nodes
    times: float = 1.0
    """How many times as much traffic as there is."""
    profile: Profile | None = None
    """None: the one that was asked for."""
    chunk_tokens: int | None = None
    """None: as it was asked for."""
    whole_chunks: bool = False
    """Whether steps take whole chunks, whoever decodes in them."""

    @property
    def roles(self) -> str:
        """The split, as `--nodes` has it."""
        return f"{self.nodes.prefill}P{self.nodes.decode}D" if self.nodes.decode else f"{self.nodes.both}C"

    @property
    def steps(self) -> str:
        """How steps are set, where that is not as it was asked for; else empty."""
        return "whole chunks" if self.whole_chunks else str(self.chunk_tokens or "")


class Served(NamedTuple):
    """What came of one replay."""

    case: Case
    share: float
    """Share of all requests that met their bounds."""
    requests: int
    goodput_per_s: float
    """Requests a second within their bounds."""
    ttft_s: float = 0.0
    """Mean; of two splits that serve nobody in time it says which is nearer."""

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return sum(self.case.nodes)

    @property
    def times(self) -> float:
        """How many times as much traffic as there is."""
        return self.case.times

    @property
    def error(self) -> float:
        """The standard error of a share of so many requests."""
        return sqrt(self.share * (1 - self.share) / max(1, self.requests))

    def serves_more(self, other: Served) -> bool:
        """Return whether more of the same requests are served, by two standard errors of how many more."""
        more = (self.share - other.share) * self.requests
        return more > 2 * sqrt(max(0.0, more))


Replayed = Callable[[Case], Served]


def other_chunks(profile: Profile) -> list[int]:
    """Return tokens of a step to try beside the default of such nodes."""
    return [default_chunk_tokens(profile) * times // 4 for times in (1, 2, 8, 16)]


def split(num_nodes: int, prefill: int) -> Nodes:
    """Return so many nodes, of which some prefill; one alone has both roles."""
    return Nodes(prefill, num_nodes - prefill, 0) if num_nodes > 1 else Nodes(0, 0, 1)


def halves(num_nodes: int) -> Nodes:
    """Return the split in halves; one node alone has both roles."""
    return split(num_nodes, (num_nodes + 1) // 2)


def best_split(case: Case, replayed: Replayed, enough: float = inf) -> Served:
    """Return the run at the split of as many nodes that serves most, climbed to from that of `case`.

    `enough`: share of requests beyond which nobody asks for a better one.
    """
    num_nodes = sum(case.nodes)
    best, step = replayed(case), num_nodes // 4 or 1
    while num_nodes > 2 and best.share < enough:
        at = best.case.nodes.prefill
        near = [prefill for prefill in (at - step, at + step) if 0 < prefill < num_nodes]
        found = max(
            (replayed(case._replace(nodes=split(num_nodes, prefill))) for prefill in near), key=_worth
        )
        if _worth(found) > _worth(best):
            best = found
        elif step == 1:
            break
        else:
            step //= 2
    return best


def neighbours(best: Served, replayed: Replayed) -> list[Served]:
    """Return the runs at the splits near that of `best`, each way up to the first that serves less."""
    runs: list[Served] = []
    for way in (-1, 1):
        for steps in range(1, NEAR + 1):
            prefill = best.case.nodes.prefill + way * steps
            if not 0 < prefill < best.nodes:
                break
            runs.append(replayed(best.case._replace(nodes=split(best.nodes, prefill))))
            if best.serves_more(runs[-1]):
                break
    return sorted(runs, key=_worth, reverse=True)


def other_beginnings(base: Served, replayed: Replayed) -> list[Served]:
    """Return the runs that begin with a quarter and with three quarters of the nodes as prefill nodes."""
    quarter = base.nodes // 4 or 1
    others = {quarter, base.nodes - quarter} - {base.case.nodes.prefill}
    return [
        replayed(base.case._replace(nodes=split(base.nodes, prefill)))
        for prefill in sorted(others)
        if 0 < prefill < base.nodes
    ]


def _worth(run: Served) -> tuple[float, float]:
    return run.share, -run.ttft_s


def said_of_splits(base: Served, others: Sequence[Served], follows: bool) -> str:
    """Return which splits serve as much as that of `base`, as far as so many requests show."""
    more = [run for run in others if run.serves_more(base)]
    less = [run for run in others if base.serves_more(run)]
    tied = [run for run in others if run not in more and run not in less]
    words = [f"{'beginning as' if follows else 'split'} {base.case.roles}: {base.share:.1%}"]
    for said, runs in (("tied with", tied), ("more by", more), ("less by", less)):
        if runs:
            words.append(f"{said} " + ", ".join(f"{run.case.roles} {run.share:.1%}" for run in runs))
    return "; ".join(words)


def better_steps(base: Served, others: Sequence[Served]) -> Served | None:
    """Return the run whose steps serve most, if that is more than those that were asked for do."""
    return max((run for run in others if run.serves_more(base)), key=_worth, default=None)


def said_of_steps(base: Served, others: Sequence[Served]) -> str:
    """Return whether steps that are set otherwise serve more than those that were asked for."""
    shares = ", ".join(f"{run.case.steps} {run.share:.1%}" for run in others)
    better = better_steps(base, others)
    found = f"{better.case.steps} serves more" if better else "no other serves more"
    return f"tokens of a step: {found} ({shares})"
