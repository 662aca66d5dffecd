"""`conductor replay TRACE`: arguments (`arguments.py`) to runs, runs to a table and a report.

Wall time comes from a clock that is handed in. `wall_s` and `requests_per_s` are all that two reports of the
same trace and seed may differ in.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from base.clock import Clock, SystemClock
from base.config import EngineConfig
from base.errors import ConfigError
from base.option_values import require_writable
from base.request import Slo
from conductor.placing.cost_model import CostModel
from conductor.placing.profile import Profile
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from conductor.profiles.reader import load_profile
from conductor.replay.arguments import DEFAULT_PROFILE, SERVICE, Nodes, make_parser
from conductor.replay.cluster import WATCH_EVERY, SimCluster
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.conformance import compared, comparison_rows, read_run, simulated
from conductor.replay.faults import read_faults
from conductor.replay.policies import PAPER_POLICIES
from conductor.replay.report import (
    Report,
    aligned,
    reach_note,
    run_report,
    to_json,
    to_table,
    trace_report,
)
from conductor.replay.requests_table import require_table, write_requests
from conductor.replay.simulate import Plan, simulate
from conductor.replay.trace import Trace
from conductor.replay.trace_formats import read_trace

POLICY_SETS: dict[str, tuple[str, ...]] = {"all": PAPER_POLICIES}

MakePlan = Callable[[argparse.Namespace, Trace, CostModel, str, Slo], Plan]


def main(argv: Sequence[str] | None = None, clock: Clock | None = None) -> int:
    """Run the command; return its exit code."""
    args = make_parser().parse_args(argv)
    return until_refused(lambda: _replay(args, clock or SystemClock()))


def _replay(args: argparse.Namespace, clock: Clock) -> int:
    if args.conformance:
        return show_conformance(args)
    trace = read_trace(args.trace, args.block_size, args.skip_bad, args.format)
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
    for option, path in (("--requests", args.requests), ("--report", args.report)):
        if path:
            require_writable(option, path)
    if args.requests:
        require_table(args.requests)
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
    reports = [run.timed for run in runs]
    text = to_json(about, reports, dataclasses.asdict(profile))
    if args.report:
        args.report.write_text(text)
    table = to_table([run.timed for run in runs])
    sys.stdout.write(text if args.json else f"{_heading(args, trace, about, profile)}\n{table}\n")


def read_profile(args: argparse.Namespace) -> Profile:
    """Return the profile that was asked for, without a store or with the disk that was."""
    profile = load_profile(args.profile or DEFAULT_PROFILE)
    if args.no_store:
        if args.disk:
            raise ConfigError("--disk: a part of a store, beside --no-store there is none")
        return profile.without_store()
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
    if args.chunk_tokens is not None and args.chunk_tokens < 16:
        raise ConfigError("--chunk-tokens: at least 16 with --conformance, whose nodes compute chunks")
    # 0: as the log or the profile says
    engine = EngineConfig(chunk_tokens=args.chunk_tokens or 0, max_batch=args.max_batch or 0)
    outcomes = simulated(run, profile, engine).outcomes
    sys.stdout.write(f"{aligned(comparison_rows(run, compared(run, outcomes)))}\n")
    return 0


def settings_of(args: argparse.Namespace) -> SchedulerSettings:
    """Return the scheduler's settings: the service's, but for what was asked for."""
    settings = SchedulerSettings(
        reject=RejectPolicy(args.reject or ("none" if args.plain else SERVICE.reject)),
        fetches=not args.no_fetch,
        kvcache_balancing_threshold=args.threshold,
        roles_follow=roles_follow(args),
    )
    if args.plain:
        return settings
    return dataclasses.replace(settings, ttft_headroom=args.headroom, ahead_s=args.ahead)


def roles_follow(args: argparse.Namespace) -> bool:
    """Return whether roles follow the load: as the service has it, where that can be."""
    is_fixed = args.plain or args.stages > 1 or args.whole_chunks
    return (args.roles or ("fixed" if is_fixed else SERVICE.roles)) == "follow"


def require_possible(args: argparse.Namespace) -> None:
    """Raise ConfigError for an option that the nodes have no use for: it is honoured or refused."""
    nodes: Nodes = args.nodes
    unused = {
        "--stages": args.stages > 1 and nodes.both > 0,
        "--decode-caches": args.decode_caches and not nodes.decode,
        "--no-retest": args.no_retest and args.reject == RejectPolicy.NONE.value,
    }
    for option in (option for option, is_unused in unused.items() if is_unused):
        raise ConfigError(f"{option}: of no use on nodes with both roles, or without rejection; leave it out")
    if args.sessions and args.session_rate:
        raise ConfigError("--session-rate: of no use beside --sessions, where one begins as another ends")
    if args.roles == "follow" and (args.stages > 1 or args.whole_chunks):
        raise ConfigError(
            "--roles follow: not with --stages, whose groups do one thing, nor with --whole-chunks, by which "
            "steps do not follow who decodes in them"
        )


def plan_of(args: argparse.Namespace, trace: Trace, cost: CostModel, policy: str, slo: Slo) -> Plan:
    """Return what to run under one policy."""
    nodes: Nodes = args.nodes
    require_possible(args)
    slow = tuple(pair for pairs in args.slow_node for pair in pairs)
    others = [pair for pairs in args.node_profile for pair in pairs]
    profiles = {name: load_profile(name) for _, name in others}
    options = ClusterOptions(
        # where every node does both, those are counted as prefill nodes
        prefill_nodes=nodes.prefill or nodes.both,
        decode_nodes=nodes.decode,
        both_nodes=nodes.both if nodes.prefill else 0,
        other_profiles=tuple((node, profiles[name]) for node, name in others),
        slow_nodes=slow,
        block_size=trace.block_size,
        policy=policy,
        settings=settings_of(args),
        learns=not (args.plain or args.no_learning),
        max_waiting=args.max_waiting,
        max_attempts=args.attempts,
        is_fair=not args.no_fair_queue,
        conductors=args.conductors,
        role_wait_s=args.role_wait,
        patience_s=args.patience,
        retests=not args.no_retest,
        slo=slo,
        eviction=args.eviction,
        faults=read_faults(args.fault) if args.fault else (),
        view_delay_s=args.view_delay,
        stages=args.stages,
        chunk_tokens=args.chunk_tokens,
        decode_caches=args.decode_caches,
        step_budgets=not args.whole_chunks,
        max_batch=args.max_batch or (inf if args.plain else EngineConfig().sequences(on_gpu=True)),
        seed=args.seed,
    )
    return Plan(
        trace,
        cost,
        options,
        args.speed,
        args.scale,
        args.jitter,
        args.until,
        args.session_rate,
        args.sessions,
    )


def _heading(args: argparse.Namespace, trace: Trace, about: Report, profile: Profile) -> str:
    sessions = f" in {about['sessions']} sessions" if about["sessions"] else ""
    lines = [
        f"{about['name']} ({about['format']}): {about['requests']} requests{sessions} over "
        f"{about['span_s']:.0f} s, blocks of {about['block_size']}, speed {about['speed']:g}, "
        f"scale {about['scale']}",
        f"profile: {profile.source}",
        reach_note(trace, profile),
    ]
    if len(trace.requests) > 1 and not (trace.span_s or args.sessions or args.session_rate):
        lines.append("all begin at once: --sessions or --session-rate says how they come")
    return "\n".join(line for line in lines if line)
