"""`conductor advise TRACE`: how many nodes a traffic needs, and how they are to be set.

The answer is the fewest nodes that serve enough of the requests within their bounds; how much more of the
same traffic they carry before they do not; and what bounds them a little beyond: there each of prefill,
decode, memory and links is made twice as good in turn, and what helps most is the bottleneck. There too other
splits are tried, and steps of other lengths (`splits.py`). Where roles follow the load nodes begin in halves;
where they are fixed each number of nodes is judged by its best split.

Each figure is a replay, with the settings that the service ships with, or with `-c cluster.yaml` those of a
deployed cluster. Bounds are kept as the service judges it: TBT is the mean of a request's gaps.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from math import inf
from pathlib import Path
from statistics import fmean

from base.errors import ConfigError
from base.option_values import real, require_writable, whole
from base.request import Slo
from bench.papers.chart import Line, chart
from bench.papers.command import SETS, make_plan, named_trace, read_arguments
from bench.papers.splits import (
    Case,
    Replayed,
    Served,
    best_split,
    better_steps,
    halves,
    neighbours,
    other_beginnings,
    other_chunks,
    said_of_splits,
    said_of_steps,
    split,
)
from conductor.placing.cost_model import CostModel
from conductor.placing.profile import Profile
from conductor.replay.arguments import MAX_NODES
from conductor.replay.command import name_bad_rows, policies_of, read_profile, roles_follow, slo_of
from conductor.replay.report import reach_note
from conductor.replay.simulate import Plan, simulate
from conductor.replay.trace import Trace

ENOUGH = 0.99
"""Share of requests within their bounds that is asked for, as of `conductor autoscale`."""

HALF = 0.5
"""Share of requests under which an answer is no answer."""

MOST_NODES = 64
BEYOND = 1.25
"""What bounds nodes is asked at so many times of what they carry."""

CLOSE = 0.05
"""How much nodes carry is found to so much of itself."""

MOST_TIMES = 16.0
"""No traffic is replayed so many times as fast: it would come all at once."""

OF_REPLAY = ("nodes", "html", "sweep", "paper", "conformance", "requests", "report", "json", "progress")
"""What replay takes, and has no meaning here."""

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


Serve = Callable[[int, float, Profile | None], Served]
"""Replays (nodes, times the traffic) on nodes of a profile; None: the one that was asked for."""


def line(run: Served) -> str:
    """Return what is shown of a replay as it ends."""
    case = run.case
    steps = f" in steps of {case.steps}" if case.steps else ""
    return (
        f"{run.nodes:5} nodes, {run.times:5.2f} times the traffic: {run.share:6.1%} +- {run.error:.1%} "
        f"within bounds, {run.goodput_per_s:.2f} requests/s ({case.roles}{steps})"
    )


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
    if not first.serves_more(base):
        return f"none of {', '.join(better)} alone"
    return " or ".join(part for part in ranked if not first.serves_more(better[part]))


def advice(
    found: Served, far: Served, base: Served, better: Mapping[str, Served], follows: bool = True
) -> str:
    """Return what the replays of the fewest nodes say; `follows`: roles follow the load."""
    roles = found.case.roles if found.nodes > 1 else "one node of both roles"
    begin = f"beginning as {roles}: roles follow the load" if follows else f"{roles}, roles fixed"
    more = f"up to {far.goodput_per_s:.2f} where it is {far.times:.2f} times as much"
    return "\n".join(
        [
            f"fewest nodes: {found.nodes}, {begin}",
            f"goodput: {found.goodput_per_s:.2f} requests/s of this traffic, "
            f"{'and hardly more of it' if far.times == 1.0 else more}",
            f"beyond, bounded by: {bottleneck(base, better)}",
            _helped(base, better),
        ]
    )


def too_few(base: Served, better: Mapping[str, Served]) -> str:
    """Return what is said where the most nodes do not serve enough."""
    half = [f"warning: {base.case.roles}, the best that was tried, serves less than half"]
    return "\n".join(
        [
            *(half if base.share < HALF else []),
            f"too few: {base.nodes} serves {base.share:.1%}, or no number keeps these bounds",
            f"bounded by: {bottleneck(base, better)}",
            _helped(base, better),
        ]
    )


def _helped(base: Served, better: Mapping[str, Served]) -> str:
    shares = ", ".join(f"{part} {run.share:.1%}" for part, run in better.items())
    return f"at {base.times:.2f} times {base.share:.1%}; with one part twice as good: {shares}"


def drawn(title: str, said: str, runs: Sequence[Served]) -> str:
    """Return a page with what is said, and what was served by nodes, traffic, split and tokens of a step."""
    last = runs[-1]
    plain = [run for run in runs if not run.case.steps]
    last_nodes = [run for run in plain if run.nodes == last.nodes]
    by_nodes: Line = _highest((run.nodes, run.share) for run in plain if run.times == 1.0)
    by_times: Line = _highest((run.times, run.goodput_per_s) for run in last_nodes)
    at_last = [run for run in last_nodes if run.times == last.times]
    by_split: Line = _highest((run.case.nodes.prefill, run.share) for run in at_last)
    by_chunk: Line = _highest(
        (run.case.chunk_tokens or 0, run.share) for run in runs if run.case.chunk_tokens
    )
    beyond = f"{last.nodes} nodes, {last.times:.2f} times the traffic"
    charts = (
        ("Share of requests within their bounds", "nodes", by_nodes),
        (f"Requests a second within their bounds, {last.nodes} nodes", "times the traffic", by_times),
        (f"Share within their bounds, {beyond}", "prefill nodes", by_split),
        (f"Share within their bounds, {beyond}", "tokens of a step", by_chunk),
    )
    figures = "".join(
        f"<figure><figcaption>{escape(heading)}</figcaption>{chart(heading, unit, [('', points)])}</figure>"
        for heading, unit, points in charts
        if len(points) > 1
    )
    words = "".join(f"<p>{escape(line)}</p>" for line in said.splitlines())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f"<title>{escape(title)}</title></head><body><h1>{escape(title)}</h1>{words}{figures}</body></html>\n"
    )


def _highest(points: Iterable[tuple[float, float]]) -> Line:
    """Return the points in order, of those with one x the highest."""
    highest: dict[float, float] = {}
    for x, y in points:
        highest[x] = max(y, highest.get(x, 0.0))
    return sorted(highest.items())


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
    if args.html:
        require_writable("--html", args.html)
    trace = named_trace(replay)
    name_bad_rows(trace)
    profile = read_profile(replay)
    for note in filter(None, (f"profile: {profile.source}", reach_note(trace, profile))):
        sys.stdout.write(f"{note}\n")
    runs: dict[Case, Served] = {}

    def replayed(case: Case) -> Served:
        if case.profile is not None:
            return _served(replay, trace, case.profile, case)
        if case not in runs:
            runs[case] = served = _served(replay, trace, profile, case)
            sys.stdout.write(f"{line(served)}\n")
            sys.stdout.flush()
        return runs[case]

    said = _said(replayed, profile, replay, args)
    sys.stdout.write(f"{said}\n")
    if args.html:
        args.html.write_text(drawn(f"conductor advise {trace.name}", said, list(runs.values())))
    return 0


def _said(replayed: Replayed, profile: Profile, replay: argparse.Namespace, args: argparse.Namespace) -> str:
    follows, share = roles_follow(replay), 0.5

    def serve(nodes: int, times: float, other: Profile | None, enough: float = args.share) -> Served:
        nonlocal share
        if follows:
            return replayed(Case(halves(nodes), times, other))
        begin = Case(split(nodes, min(nodes - 1, max(1, round(share * nodes)))), times, other)
        if other is not None:
            return replayed(begin)
        best = best_split(begin, replayed, enough)
        share = best.case.nodes.prefill / nodes or share
        return best

    base = found = fewest(args.most, serve, args.share)
    is_enough = found.share >= args.share
    if is_enough:
        far = furthest(found, serve, args.share)
        base = serve(found.nodes, BEYOND * far.times, None, inf)
    better = {part: serve(base.nodes, base.times, improved(profile, part)) for part in PARTS}
    said = [advice(found, far, base, better, follows) if is_enough else too_few(base, better)]
    if base.nodes > 1:
        others = other_beginnings(base, replayed) if follows else neighbours(base, replayed)
        said.append(said_of_splits(base, others, follows))
    if replay.chunk_tokens is None and (follows or profile.chunk_step_s):
        steps = [base.case._replace(chunk_tokens=tokens) for tokens in other_chunks(profile)]
        if not (follows or replay.whole_chunks):
            steps.append(base.case._replace(whole_chunks=True))
        others = [replayed(case) for case in steps]
        said.append(said_of_steps(base, others))
        better_set = better_steps(base, others)
        if is_enough and better_set and found.nodes > 1:
            fewer = Case(halves(found.nodes - 1), 1.0, None, *better_set.case[3:])
            run = replayed(fewer) if follows else best_split(fewer, replayed, args.share)
            said.append(f"with {better_set.case.steps} {run.nodes} nodes serve {run.share:.1%}")
    return "\n".join(said)


def _require_possible(replay: argparse.Namespace) -> None:
    """Raise ConfigError for an option that says what is to be found, or what is shown of one run."""
    for name in OF_REPLAY:
        if getattr(replay, name):
            raise ConfigError(f"--{name}: an option of conductor replay alone")
    if len(policies_of(replay, SETS)) > 1:
        raise ConfigError(f"--policy {replay.policy}: one at a time")
    if replay.stages > 1:
        raise ConfigError(f"--stages {replay.stages}: splits of groups are drawn by conductor replay --sweep")


def _served(replay: argparse.Namespace, trace: Trace, profile: Profile, case: Case) -> Served:
    asked = {
        "nodes": case.nodes,
        "chunk_tokens": case.chunk_tokens or replay.chunk_tokens,
        "whole_chunks": case.whole_chunks or replay.whole_chunks,
    }
    args = argparse.Namespace(**vars(replay) | asked)
    slo: Slo = slo_of(args)
    cluster = simulate(hastened(make_plan(args, trace, CostModel(profile), args.policy, slo), case.times))
    outcomes = cluster.outcomes
    share = outcomes.served_share_within(slo.ttft_slo_s, slo.tbt_slo_s)
    count = outcomes.num_arrived
    ttft_s = fmean(outcomes.ttft_s) if outcomes.num_completed else inf
    return Served(case, share, count, share * count / max(cluster.now_s, 1e-9), ttft_s)


if __name__ == "__main__":
    sys.exit(main())
