"""`conductor advise TRACE`: how many nodes a traffic needs, where roles follow it.

The answer is the fewest nodes that serve enough of the requests within their bounds; how much more of the
same traffic they carry before they do not; and what bounds them a little beyond: there each of prefill,
decode, memory and links is made twice as good in turn, and what helps most is the bottleneck. Which nodes
prefill and which decode is no part of it: they begin in halves and follow the load. Where roles are fixed
that is a question of its own, which `conductor replay --sweep` draws.

Each figure is a replay, with the settings that the service ships with, or with `-c cluster.yaml` those of a
deployed cluster. Bounds are kept as the service judges it: TBT is the mean of a request's gaps.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import sqrt
from pathlib import Path
from typing import NamedTuple

from base.errors import ConfigError
from base.option_values import real, whole
from base.request import Slo
from bench.papers.chart import Line, chart
from bench.papers.command import SETS, make_plan, named_trace, read_arguments
from conductor.placing.cost_model import CostModel
from conductor.placing.profile import Profile
from conductor.replay.arguments import MAX_NODES, Nodes
from conductor.replay.command import name_bad_rows, policies_of, read_profile, roles_follow, slo_of
from conductor.replay.report import reach_note
from conductor.replay.simulate import Plan, simulate
from conductor.replay.trace import Trace

ENOUGH = 0.99
"""Share of requests within their bounds that is asked for, as of `conductor autoscale`."""

MOST_NODES = 64
BEYOND = 1.25
"""What bounds nodes is asked at so many times of what they carry."""

CLOSE = 0.05
"""How much nodes carry is found to so much of itself."""

MOST_TIMES = 16.0
"""No traffic is replayed so many times as fast: it would come all at once."""

OF_REPLAY = ("nodes", "html", "sweep", "paper", "conformance", "requests", "report", "json", "progress")
"""What replay is told, and has no meaning here."""

PREFILL = ("prefill_fixed_s", "prefill_token_s", "prefill_token2_s", "prefill_small_s", "prefix_token_s")
DECODE = ("decode_fixed_s", "decode_sequence_s", "decode_context_token_s", "decode_experts_s")
PARTS: dict[str, dict[str, float]] = {
    "prefill": dict.fromkeys((*PREFILL, "chunk_step_s", "chunk_token2_s"), 0.5),
    "decode": dict.fromkeys(
        (*DECODE, "mixed_step_s", "chunk_sequence_s"),
        0.5,
    ),
    "memory": dict.fromkeys(("device_kv_tokens", "host_kv_tokens"), 2),
    "links": {"transfer_bytes_per_s": 2.0, "transfer_fixed_s": 0.5},
}
"""What may bound nodes, and what its fields of a profile are multiplied with to be twice as good."""


class Served(NamedTuple):
    """What came of one replay."""

    nodes: int
    times: float
    """How many times as much traffic as there is."""
    share: float
    """Share of all requests that met their bounds."""
    requests: int
    goodput_per_s: float
    """Requests a second within their bounds."""

    @property
    def error(self) -> float:
        """The standard error of a share of so many requests."""
        return sqrt(self.share * (1 - self.share) / max(1, self.requests))

    def line(self) -> str:
        """Return what is shown of it."""
        return (
            f"{self.nodes:5} nodes, {self.times:5.2f} times the traffic: {self.share:6.1%} +- "
            f"{self.error:.1%} within bounds, {self.goodput_per_s:.2f} requests/s"
        )


Serve = Callable[[int, float, Profile | None], Served]
"""Replays (nodes, times the traffic) on nodes of a profile; None: the one that was asked for."""


def halves(num_nodes: int) -> Nodes:
    """Return the roles that nodes begin with; one alone has both."""
    return Nodes((num_nodes + 1) // 2, num_nodes // 2, 0) if num_nodes > 1 else Nodes(0, 0, 1)


def hastened(plan: Plan, times: float) -> Plan:
    """Return so many times as much of the same traffic."""
    if plan.sessions:
        return dataclasses.replace(plan, sessions=max(1, round(plan.sessions * times)))
    if plan.session_rate:
        return dataclasses.replace(plan, session_rate=plan.session_rate * times)
    return dataclasses.replace(plan, speed=plan.speed * times)


def improved(profile: Profile, part: str) -> Profile:
    """Return the profile of nodes of which one part is twice as good."""
    better = {name: getattr(profile, name) * times for name, times in PARTS[part].items()}
    return dataclasses.replace(profile, **better)


def fewest(most: int, serve: Serve, enough: float) -> Served:
    """Return the run of the fewest nodes, `most` at most, that serve enough; that of `most` where none do.

    By bisection: more nodes serve no less.
    """
    found = serve(most, 1.0, None)
    low, high = 1 if found.share >= enough else most, most
    while low < high:
        middle = (low + high) // 2
        run = serve(middle, 1.0, None)
        if run.share >= enough:
            high, found = middle, run
        else:
            low = middle + 1
    return found


def furthest(found: Served, serve: Serve, enough: float) -> Served:
    """Return the run with the most traffic that the nodes of `found` serve enough of."""
    low, high, best = 1.0, 1.5, found
    while (run := serve(found.nodes, high, None)).share >= enough:
        low, best, high = high, run, high * 1.5
        if high > MOST_TIMES:
            return best
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        run = serve(found.nodes, middle, None)
        if run.share >= enough:
            low, best = middle, run
        else:
            high = middle
    return best


def bottleneck(base: Served, better: Mapping[str, Served]) -> str:
    """Return which part bounds nodes, by the share of requests that each gives where it is twice as good."""
    ranked = sorted(better, key=lambda part: -better[part].share)
    first = better[ranked[0]]
    if not _serves_more(first, base):
        return f"none of {', '.join(better)} alone"
    return " or ".join(part for part in ranked if not _serves_more(first, better[part]))


def _serves_more(one: Served, other: Served) -> bool:
    """Return whether more of the same requests are served, by two standard errors of how many those are."""
    more = (one.share - other.share) * one.requests
    return more > 2 * sqrt(max(0.0, more))


def advice(found: Served, far: Served, base: Served, better: Mapping[str, Served]) -> str:
    """Return what the replays of the fewest nodes say."""
    begin = halves(found.nodes)
    roles = f"{begin.prefill}P{begin.decode}D" if begin.decode else "one node of both roles"
    more = f"up to {far.goodput_per_s:.2f} where it is {far.times:.2f} times as much"
    return "\n".join(
        [
            f"fewest nodes: {found.nodes}, beginning as {roles}: roles follow the load",
            f"goodput: {found.goodput_per_s:.2f} requests/s of this traffic, "
            f"{'and hardly more of it' if far.times == 1.0 else more}",
            f"beyond, bounded by: {bottleneck(base, better)}",
            _helped(base, better),
        ]
    )


def too_few(base: Served, better: Mapping[str, Served]) -> str:
    """Return what is said where the most nodes do not serve enough."""
    return "\n".join(
        [
            f"too few: {base.nodes} serves {base.share:.1%}, or no number keeps these bounds",
            f"bounded by: {bottleneck(base, better)}",
            _helped(base, better),
        ]
    )


def _helped(base: Served, better: Mapping[str, Served]) -> str:
    shares = ", ".join(f"{part} {run.share:.1%}" for part, run in better.items())
    return f"at {base.times:.2f} times {base.share:.1%}; with one part twice as good: {shares}"


def drawn(title: str, said: str, runs: Sequence[Served]) -> str:
    """Return a page with what is said, the share by nodes, and the goodput of the last nodes by traffic."""
    nodes = runs[-1].nodes
    by_nodes: Line = sorted((float(run.nodes), run.share) for run in runs if run.times == 1.0)
    by_times: Line = sorted((run.times, run.goodput_per_s) for run in runs if run.nodes == nodes)
    charts = (
        ("Share of requests within their bounds", "nodes", by_nodes),
        (f"Requests a second within their bounds, {nodes} nodes", "times the traffic", by_times),
    )
    figures = "".join(
        f"<figure><figcaption>{escape(heading)}</figcaption>{chart(heading, unit, [('', line)])}</figure>"
        for heading, unit, line in charts
    )
    words = "".join(f"<p>{escape(line)}</p>" for line in said.splitlines())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f"<title>{escape(title)}</title></head><body><h1>{escape(title)}</h1>{words}{figures}</body></html>\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; what it does not know is replay's."""
    parser = argparse.ArgumentParser(
        prog="conductor advise",
        description="How many nodes serve a trace within bounds, how much they carry, and what bounds them; "
        "other options are those of replay.",
    )
    add = parser.add_argument
    add("trace", type=Path)
    share = f"of the requests, to be served within their bounds ({ENOUGH:g})"
    add("--share", type=real(0, 1, above=True), default=ENOUGH, metavar="X", help=share)
    most = f"nodes, at most ({MOST_NODES})"
    add("--most", type=whole(1, MAX_NODES), default=MOST_NODES, metavar="N", help=most)
    add("--html", type=Path, metavar="OUT.html", help="a page that draws what was tried")
    args, passed = parser.parse_known_args(argv)
    try:
        return _advise(args, read_arguments([str(args.trace), *passed], nodes=None))
    except ConfigError as error:
        sys.stderr.write(f"conductor advise: {error}\n")
        return 2


def _advise(args: argparse.Namespace, replay: argparse.Namespace) -> int:
    _require_possible(replay)
    trace = named_trace(replay)
    name_bad_rows(trace)
    profile = read_profile(replay)
    for note in filter(None, (f"profile: {profile.source}", reach_note(trace, profile))):
        sys.stdout.write(f"{note}\n")
    runs: dict[tuple[int, float], Served] = {}

    def serve(nodes: int, times: float, other: Profile | None) -> Served:
        if other is not None:
            return _served(replay, trace, other, nodes, times)
        if (nodes, times) not in runs:
            runs[nodes, times] = served = _served(replay, trace, profile, nodes, times)
            sys.stdout.write(f"{served.line()}\n")
            sys.stdout.flush()
        return runs[nodes, times]

    said = _said(serve, profile, args.most, args.share)
    sys.stdout.write(f"{said}\n")
    if args.html:
        args.html.write_text(drawn(f"conductor advise {trace.name}", said, list(runs.values())))
    return 0


def _said(serve: Serve, profile: Profile, most: int, enough: float) -> str:
    base = found = fewest(most, serve, enough)
    is_enough = found.share >= enough
    if is_enough:
        far = furthest(found, serve, enough)
        base = serve(found.nodes, BEYOND * far.times, None)
    better = {part: serve(base.nodes, base.times, improved(profile, part)) for part in PARTS}
    return advice(found, far, base, better) if is_enough else too_few(base, better)


def _require_possible(replay: argparse.Namespace) -> None:
    """Raise ConfigError for an option that says what is to be found, or what is shown of one run."""
    for name in OF_REPLAY:
        if getattr(replay, name):
            raise ConfigError(f"--{name}: an option of conductor replay alone")
    if len(policies_of(replay, SETS)) > 1:
        raise ConfigError(f"--policy {replay.policy}: one at a time")
    if not roles_follow(replay):
        raise ConfigError("fixed roles have splits, of which conductor replay --html OUT --sweep draws each")


def _served(replay: argparse.Namespace, trace: Trace, profile: Profile, nodes: int, times: float) -> Served:
    args = argparse.Namespace(**vars(replay) | {"nodes": halves(nodes)})
    slo: Slo = slo_of(args)
    cluster = simulate(hastened(make_plan(args, trace, CostModel(profile), args.policy, slo), times))
    outcomes = cluster.outcomes
    share = outcomes.served_share_within(slo.ttft_slo_s, slo.tbt_slo_s)
    count = outcomes.num_arrived
    return Served(nodes, times, share, count, share * count / max(cluster.now_s, 1e-9))


if __name__ == "__main__":
    sys.exit(main())
