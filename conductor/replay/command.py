"""`conductor replay TRACE`: arguments to runs, runs to a table and a report.

Wall time comes from a clock that is handed in, and goes to the table alone: the report
file holds nothing that two runs of the same trace and seed could differ in, unless
`--timing` asks for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from base.clock import Clock, SystemClock
from base.config import SchedulerConfig
from base.errors import ConfigError
from base.request import Slo
from conductor.placing.cost_model import CostModel
from conductor.placing.profile import Profile
from conductor.placing.roles import RoleSettings
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from conductor.profile_file import load_profile, preset_names
from conductor.replay.cluster import WATCH_EVERY, SimCluster
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.conformance import compared, comparison_rows, read_run, simulated
from conductor.replay.faults import read_faults
from conductor.replay.policies import PAPER_POLICIES, POLICIES
from conductor.replay.report import (
    Report,
    aligned,
    run_report,
    to_json,
    to_table,
    trace_report,
)
from conductor.replay.requests_table import require_writable, write_requests
from conductor.replay.simulate import Plan, simulate
from conductor.replay.trace import Trace
from conductor.replay.trace_formats import read_trace
from kvstore.eviction import BY_NAME

POLICY_SETS: dict[str, tuple[str, ...]] = {"all": PAPER_POLICIES}

MakePlan = Callable[[argparse.Namespace, Trace, CostModel, str, Slo], Plan]

DEFAULT_PROFILE = "a800-llama70b"

SERVICE = SchedulerConfig()
"""The settings that the service ships with, which replay takes unless it is asked for others."""

# The paper's real-trace bounds (arXiv 2407.00079, section 8.1.3).
DEFAULT_SLO = Slo(ttft_slo_s=30.0, tbt_slo_s=0.1)

# Roles change for a mean queue well inside the TTFT bound, which is for the tail.
FLIP_TTFT_SHARE = 5.0


def main(argv: Sequence[str] | None = None, clock: Clock | None = None) -> int:
    """Run the command; return its exit code."""
    args = make_parser().parse_args(argv)
    return until_refused(lambda: _replay(args, clock or SystemClock()))


def make_parser(more_policies: Sequence[str] = (), more_traces: str = "") -> argparse.ArgumentParser:
    """Return the parser of the command's arguments, and of what a command that is built on it adds."""
    parser = argparse.ArgumentParser(
        prog="conductor replay", description="Run a trace through the scheduler in virtual time."
    )
    add = parser.add_argument
    add("trace", type=Path, help=f"a file (docs/explanation/replay.md), plain or .gz{more_traces}")
    add(
        "--nodes",
        type=parse_nodes,
        default=(8, 8),
        metavar="8P8D|16C",
        help="prefill and decode, or colocated nodes",
    )
    add("--policy", choices=[*POLICIES, "all", *more_policies], default="global")
    add("--reject", choices=[policy.value for policy in RejectPolicy], default="none")
    _add_settings(add)
    add("--no-retest", action="store_true", help="a decode node takes what was admitted, whatever its load")
    add("--profile", help=f"file, or one of {', '.join(preset_names())}; {DEFAULT_PROFILE}, or the log's own")
    add("--speed", type=_positive, default=1.0, help="arrivals so many times faster")
    add("--scale", type=int, default=1, help="so many copies of the trace, each with its own blocks")
    add("--jitter", type=float, default=0.0, metavar="S", help="spread each arrival over S seconds")
    add("--until", type=int, metavar="N", help="the first N requests only")
    add("--slo-ttft", type=_positive, default=DEFAULT_SLO.ttft_slo_s, metavar="S")
    add("--slo-tbt", type=_positive, default=DEFAULT_SLO.tbt_slo_s, metavar="S")
    add("--threshold", type=_positive, metavar="X", help="kvcache_balancing_threshold (cost model decides)")
    add("--eviction", choices=list(BY_NAME), default="lru", help="policy of the nodes' caches")
    add("--view-delay", type=float, default=0.0, metavar="S", help="KV events reach the conductor late")
    add(
        "--fault",
        type=Path,
        metavar="FILE",
        help='nodes that die: {"at_s": 600, "node": "p3", "for_s": 120} a line',
    )
    add("--chunk-tokens", type=int, metavar="N", help="of a step (the profile says); 0: all of a prompt")
    add("--stages", type=int, default=1, metavar="X", help="prefill nodes that pipeline each prompt (CPP)")
    add("--disk", type=float, metavar="TOKENS", help="tokens of KV on each node's disk (the profile's)")
    add("--disk-rate", type=_positive, metavar="B/S", help="bytes a second of a disk (the profile's)")
    add("--decode-caches", action="store_true", help="decode nodes keep and lend the prompts they receive")
    add("--flip-roles", action="store_true", help="nodes change roles with the load")
    add("--block-size", type=int, metavar="N", help="tokens per hash id (the header's, or 512)")
    add("--seed", type=int, default=0)
    add("--skip-bad", action="store_true", help="count bad rows instead of stopping")
    add("--report", type=Path, metavar="OUT.json")
    add("--requests", type=Path, metavar="OUT", help="a row for each request: .csv, .csv.gz or .parquet")
    add("--progress", action="store_true", help="say on stderr how far a run is")
    add("--timing", action="store_true", help="put wall times into the report too")
    add("--json", action="store_true", help="print the report instead of the table")
    add(
        "--conformance",
        action="store_true",
        help="TRACE is a decision log: what happened beside its simulation, with its own nodes",
    )
    return parser


def _add_settings(add: Callable[..., object]) -> None:
    """Add the options that stand for settings of the service, with what it ships with as defaults."""
    add("--plain", action="store_true", help="as the papers: no --ahead or --headroom, nothing learned")
    add("--ahead", type=_seconds, default=SERVICE.ahead_s, metavar="S", help="queued on a node, at most")
    add("--headroom", type=_share, default=SERVICE.ttft_headroom, metavar="X", help="of a TTFT bound")
    add(
        "--inline-tokens",
        type=int,
        default=SERVICE.inline_tokens,
        metavar="N",
        help="that a decode node computes",
    )
    add(
        "--max-waiting",
        type=int,
        default=SERVICE.max_waiting,
        metavar="N",
        help="requests, before one is let go",
    )
    add(
        "--role-wait",
        type=_seconds,
        default=SERVICE.role_wait_s,
        metavar="S",
        help="for a role without a node",
    )
    add(
        "--no-learning",
        action="store_true",
        help="predictions by the profile alone, not by what was measured",
    )


def parse_nodes(text: str) -> tuple[int, int]:
    """Return (prefill, decode) of a text like 8P8D; (colocated, 0) of one like 16C."""
    match = re.fullmatch(r"([1-9]\d*)(?:P([1-9]\d*)D|C)", text, re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}: like 8P8D, at least one of each, or 16C")
    return int(match[1]), int(match[2] or 0)


def _seconds(text: str) -> float:
    return _number(text, "not negative", lambda value: value >= 0)


def _share(text: str) -> float:
    return _number(text, "above 0, at most 1", lambda value: 0 < value <= 1)


def _positive(text: str) -> float:
    return _number(text, "more than 0", lambda value: 0 < value < inf)


def _number(text: str, wanted: str, is_so: Callable[[float], bool]) -> float:
    value = float(text)
    if not is_so(value):
        raise argparse.ArgumentTypeError(f"{text}: {wanted}")
    return value


def _replay(args: argparse.Namespace, clock: Clock) -> int:
    if args.conformance:
        return show_conformance(args)
    trace = read_trace(args.trace, args.block_size, args.skip_bad)
    name_bad_rows(trace)
    profile = read_profile(args)
    write(args, trace, profile, run_all(args, trace, profile, clock, policies_of(args, POLICY_SETS)))
    return 0


def until_refused(run: Callable[[], int]) -> int:
    """Return the exit code of `run`; of input that is refused, one line and 2."""
    try:
        return run()
    except ConfigError as error:
        sys.stderr.write(f"conductor replay: {error}\n")
        return 2


def name_bad_rows(trace: Trace) -> None:
    """Say on standard error which rows of a trace were passed over."""
    for reason in trace.bad_rows:
        sys.stderr.write(f"passed over {reason}\n")


def slo_of(args: argparse.Namespace) -> Slo:
    return Slo(args.slo_ttft, args.slo_tbt)


def policies_of(args: argparse.Namespace, sets: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the policies to run, one after the other."""
    return sets.get(args.policy, (args.policy,))


@dataclass(frozen=True, slots=True)
class TimedReport:
    """A finished run's report, and how long it took."""

    report: Report
    wall_s: float

    @property
    def timed(self) -> Report:
        """The report with the wall time in it."""
        per_s = round(self.report["requests"] / self.wall_s)
        return {**self.report, "wall_s": round(self.wall_s, 3), "requests_per_s": per_s}


def run_all(
    args: argparse.Namespace,
    trace: Trace,
    profile: Profile,
    clock: Clock,
    policies: tuple[str, ...],
    make_plan: MakePlan | None = None,
    ran: Callable[[SimCluster], None] = lambda cluster: None,
) -> list[TimedReport]:
    """Run a trace under each policy.

    Args:
        make_plan: `plan_of`, or what adds to it.
        ran: Takes each finished cluster.
    """
    slo, runs = slo_of(args), []
    if args.requests:
        require_writable(args.requests)
    for policy in policies:
        plan = (make_plan or plan_of)(args, trace, CostModel(profile), policy, slo)
        started_s = clock.now_s()
        watch = ProgressLine(plan, clock).watch if args.progress else None
        cluster = simulate(plan, watch)
        if args.requests:
            write_requests(cluster.outcomes, _named(args.requests, policy, len(policies)))
        ran(cluster)
        runs.append(TimedReport(run_report(cluster, slo), max(clock.now_s() - started_s, 1e-9)))
    return runs


def write(args: argparse.Namespace, trace: Trace, profile: Profile, runs: Sequence[TimedReport]) -> None:
    """Write the report and the table of some runs."""
    about = trace_report(trace, args.speed, args.scale)
    reports = [run.timed if args.timing else run.report for run in runs]
    text = to_json(about, reports, dataclasses.asdict(profile))
    if args.report:
        args.report.write_text(text)
    table = to_table([run.timed for run in runs])
    sys.stdout.write(text if args.json else f"{_heading(about, profile.source)}\n{table}\n")


def read_profile(args: argparse.Namespace) -> Profile:
    """Return the profile that was asked for, with the disk that was."""
    profile = load_profile(args.profile or DEFAULT_PROFILE)
    if args.disk is not None:
        profile = dataclasses.replace(profile, disk_kv_tokens=int(args.disk))
    if args.disk_rate is not None:
        profile = dataclasses.replace(profile, disk_bytes_per_s=args.disk_rate)
    if profile.disk_kv_tokens and not profile.disk_bytes_per_s:
        raise ConfigError("a disk without a rate: --disk-rate says how fast it reads")
    return profile


def _named(path: Path, policy: str, num_policies: int) -> Path:
    """Return where one policy's rows go: the path itself, or one with the policy's name in it."""
    return path if num_policies == 1 else path.with_name(f"{policy}-{path.name}")


class ProgressLine:
    """Shows how far a run is, on standard error."""

    def __init__(self, plan: Plan, clock: Clock) -> None:
        self._clock = clock
        self._policy = plan.options.policy
        self._num_requests = len(plan.trace.requests[: plan.limit]) * plan.scale
        self._started_s = clock.now_s()

    def watch(self, now_s: float, num_arrived: int) -> None:
        """Write one line over the one before."""
        passed_s = max(1e-9, self._clock.now_s() - self._started_s)
        per_s = num_arrived / passed_s
        left_s = max(0.0, self._num_requests - num_arrived) / per_s
        sys.stderr.write(
            f"\r{self._policy}: {num_arrived} of {self._num_requests} requests, {now_s:.0f} s simulated, "
            f"{per_s:.0f} requests/s, {left_s:.0f} s left "
        )
        if num_arrived + WATCH_EVERY > self._num_requests:
            sys.stderr.write("\n")
        sys.stderr.flush()


def show_conformance(args: argparse.Namespace) -> int:
    """Print what happened beside its simulation; return the exit code."""
    run = read_run(args.trace)
    profile = load_profile(args.profile) if args.profile else run.shared.profile
    outcomes = simulated(run, profile, args.decode_caches).outcomes
    sys.stdout.write(f"{aligned(comparison_rows(run, compared(run, outcomes)))}\n")
    return 0


def settings_of(args: argparse.Namespace) -> SchedulerSettings:
    """Return the scheduler's settings: the service's, but for what was asked for."""
    settings = SchedulerSettings(
        reject=RejectPolicy(args.reject),
        kvcache_balancing_threshold=args.threshold,
        inline_tokens=args.inline_tokens,
    )
    if args.plain:
        return settings
    return dataclasses.replace(settings, ttft_headroom=args.headroom, ahead_s=args.ahead)


def plan_of(args: argparse.Namespace, trace: Trace, cost: CostModel, policy: str, slo: Slo) -> Plan:
    """Return what to run under one policy."""
    prefill_nodes, decode_nodes = args.nodes
    options = ClusterOptions(
        prefill_nodes=prefill_nodes,
        decode_nodes=decode_nodes,
        block_size=trace.block_size,
        policy=policy,
        settings=settings_of(args),
        learns=not (args.plain or args.no_learning),
        max_waiting=args.max_waiting,
        role_wait_s=args.role_wait,
        retests=not args.no_retest,
        slo=slo,
        eviction=args.eviction,
        faults=read_faults(args.fault) if args.fault else (),
        roles=RoleSettings(slo.ttft_slo_s / FLIP_TTFT_SHARE, slo.tbt_slo_s) if args.flip_roles else None,
        view_delay_s=args.view_delay,
        stages=args.stages,
        chunk_tokens=args.chunk_tokens,
        decode_caches=args.decode_caches,
        seed=args.seed,
    )
    return Plan(trace, cost, options, args.speed, args.scale, args.jitter, args.until)


def _heading(about: Report, source: str) -> str:
    return (
        f"{about['name']}: {about['requests']} requests over {about['span_s']:.0f} s, "
        f"blocks of {about['block_size']}, speed {about['speed']:g}, scale {about['scale']}\n"
        f"profile: {source}"
    )


if __name__ == "__main__":
    sys.exit(main())
