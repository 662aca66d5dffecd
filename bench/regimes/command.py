"""Where another placement rule beats ours, and by how much.

    python -m bench.regimes                         # every regime, seeds that nobody tuned to, losses first
    python -m bench.regimes --seeds tune            # the seeds that the rule may be tuned on
    python -m bench.regimes --only "agents, 70B" --full     # one row at its whole length
    python -m bench.regimes --smoke                 # a few regimes and requests: whether it runs
    python -m bench.regimes --roles fixed           # nodes that do what their pool is for
    python -m bench.regimes --eviction admission    # caches that keep what may return, and not the latest
    python -m bench.regimes --jobs 16               # so many regimes at a time, a process for each

Every rule meets the same requests in the same cluster, with the settings that the service ships: its queue,
its headroom, what it learns, and roles that follow the load; with `--roles fixed` pools, as rivals have them.
Goodput is the share of all requests that had their first token and their tokens in time; one that was
rejected had not. Where roles follow, a request's gaps are in time in the mean, which is what steps are
planned for and the service judges by; in pools the longest tenth of them is, as in the papers. Only the
choice of the prefill node differs; where `late` and `early` are named, only the kind of rejection.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from base.distribution import distribution
from base.option_values import whole
from bench.about_run import about_run, write_result
from bench.regimes.table import FULL_REQUESTS, REQUESTS, SERVICE, Regime, regimes
from conductor.replay.report import aligned
from conductor.replay.simulate import simulate
from conductor.replay.trace import Trace
from kvstore.eviction import BY_NAME

OURS = "global"
SEEDS = {"tune": (1, 2), "test": (11, 12)}
TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
SMOKE_REQUESTS = 60
LOST = 0.97
"""Our goodput over the best other's, below which a regime is lost."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a rule came to in a regime, the mean of its seeds."""

    rule: str
    goodput: float
    ttft_mean_s: float
    ttft_p99_s: float
    rejected: float
    """Share of the requests."""
    hit_rate: float
    goodput_of_longest_gaps: float
    """The share in time by the longest tenth of a request's gaps, whatever `goodput` goes by."""


def score(regime: Regime, rule: str, traces: Mapping[int, Trace]) -> Score:
    """Return the means over the seeds that the traces are of."""
    columns: list[tuple[float, ...]] = []
    for seed, trace in traces.items():
        gc.freeze()  # what was there before is not looked through for each of hundreds of runs
        outcomes = simulate(regime.plan(trace, rule, seed)).outcomes
        ttft_s, bounds = distribution(outcomes.ttft_s), (regime.slo.ttft_slo_s, regime.slo.tbt_slo_s)
        of_longest = outcomes.share_within(*bounds)
        goodput = outcomes.served_share_within(*bounds) if regime.roles_follow else of_longest
        rejected = outcomes.num_rejected / max(1, outcomes.num_arrived)
        hit_rate = outcomes.hit_rate_tokens()
        columns.append((goodput, ttft_s["mean"], ttft_s["p99"], rejected, hit_rate, of_longest))
        del outcomes
        gc.collect()  # a cluster is of cycles, and the collector waits for gigabytes of them
        gc.unfreeze()
    return Score(rule, *map(fmean, zip(*columns, strict=True)))


@dataclass(frozen=True, slots=True)
class Compared:
    """One regime: ours and the others, best goodput first."""

    regime: str
    ours: Score
    others: tuple[Score, ...]

    @property
    def lead(self) -> float:
        """Our goodput less the best other's."""
        return self.ours.goodput - self.others[0].goodput

    @property
    def ratio(self) -> float:
        """Our goodput over the best other's."""
        best = self.others[0].goodput
        return self.ours.goodput / best if best else 1.0


def compare(regime: Regime, requests: int, seeds: Sequence[int], rivals: Sequence[str] = ()) -> Compared:
    """Run a regime under every rule."""
    traces = {seed: regime.make(requests, seed) for seed in seeds}
    scores = [score(regime, rule, traces) for rule in rivals or regime.rivals]
    scores.sort(key=lambda each: (-each.goodput, each.ttft_mean_s))
    return Compared(regime.name, score(regime, OURS, traces), tuple(scores))


def compare_all(chosen: Sequence[Regime], args: argparse.Namespace) -> Iterable[Compared]:
    """Run regimes one after the other; with `--jobs` several at a time, each in a process of its own.

    They come in their order, each when it is done.
    """
    if args.jobs > 1:
        with ThreadPoolExecutor(args.jobs) as pool:
            yield from pool.map(lambda regime: _in_process(regime, args), chosen)
    else:
        for regime in chosen:
            yield compare(regime, _num_requests(args), SEEDS[args.seeds], args.rules)


def _in_process(regime: Regime, args: argparse.Namespace) -> Compared:
    """Run one regime as this very command would, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        words = ["--name", regime.name, "--seeds", args.seeds, "--traces", str(args.traces)]
        words += ["--rules", *args.rules] if args.rules else []
        words += ["--full"] if args.full else []
        words += ["--smoke"] if args.smoke else []
        words += ["--eviction", args.eviction, "--roles", args.roles]
        command = [sys.executable, "-m", "bench.regimes", *words, "--out", str(out)]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True)
        (found,) = json.loads(out.read_text())["regimes"]
    return compared_of(found)


def compared_of(found: Mapping[str, Any]) -> Compared:
    """Return a regime as a result's JSON has it."""
    others = tuple(Score(**each) for each in found["others"])
    return Compared(found["regime"], Score(**found["ours"]), others)


def _num_requests(args: argparse.Namespace) -> int:
    if args.smoke:
        return SMOKE_REQUESTS
    return FULL_REQUESTS if args.full else REQUESTS


def rows_of(compared: Sequence[Compared]) -> list[list[str]]:
    """Return a table, the regimes where another rule beats ours by most first."""
    rows = [["regime", "ours", "TTFT s", "p99", "best other", "", "TTFT s", "p99", "lead"]]
    for each in sorted(compared, key=lambda one: one.lead):
        ours, best = each.ours, each.others[0]
        rows.append([each.regime, *_cells(ours), best.rule, *_cells(best), f"{each.lead:+.1%}"])
    return rows


def _cells(score: Score) -> list[str]:
    return [f"{score.goodput:.1%}", f"{score.ttft_mean_s:.2f}", f"{score.ttft_p99_s:.1f}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 0 whoever is first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--seeds", choices=[*SEEDS], default="test")
    add("--only", metavar="TEXT", help="regimes whose name has this in it")
    add("--rules", nargs="+", default=(), metavar="RULE", help="others to run instead of each regime's own")
    add("--eviction", choices=list(BY_NAME), default="lru", help="policy of the nodes' caches")
    add("--roles", choices=["follow", "fixed"], default=SERVICE.roles, help="as `scheduler.roles`")
    add("--full", action="store_true", help=f"{FULL_REQUESTS} requests of each regime, not {REQUESTS}")
    add("--smoke", action="store_true", help=f"{SMOKE_REQUESTS} requests of every tenth regime")
    add("--traces", type=Path, default=TRACES, metavar="FOLDER", help="with conversation_trace.jsonl")
    add("--out", type=Path, metavar="OUT.json")
    add("--jobs", type=whole(1, 1024), default=1, help="regimes at a time")
    add("--name", metavar="REGIME", help="one regime, by its whole name")
    args = parser.parse_args(argv)
    rows = [replace(each, eviction=args.eviction) for each in regimes(args.traces)]
    if args.roles == "follow":
        rows = [replace(each, roles_follow=not each.is_plain) for each in rows]
    chosen = [each for each in rows if not args.only or args.only in each.name]
    if args.name:
        chosen = [each for each in chosen if each.name == args.name]
    if not chosen:
        parser.error(f"--only {args.only!r}, --name {args.name!r}: no regime is called so")
    if args.smoke and not args.name:
        chosen = chosen[::10]
    compared, began_s = [], time.perf_counter()
    for each in compare_all(chosen, args):
        compared.append(each)
        print(_line(each, time.perf_counter() - began_s), file=sys.stderr, flush=True)
    print(aligned(rows_of(compared)))
    lost = [each for each in compared if each.ratio < LOST]
    print(f"\n{len(lost)} of {len(compared)} regimes where another rule has 3 % more goodput than ours")
    result = {
        "about": about_run(),
        "requests": _num_requests(args),
        "seeds": SEEDS[args.seeds],
        "roles": args.roles,
        "lost": len(lost),
    }
    result["regimes"] = [
        asdict(each) | {"lead": each.lead, "ratio": each.ratio}
        for each in sorted(compared, key=lambda one: one.lead)
    ]
    write_result(args.out, result)
    return 0


def _line(compared: Compared, since_s: float) -> str:
    others = ", ".join(f"{each.rule} {each.goodput:.1%} {each.ttft_mean_s:.2f}" for each in compared.others)
    ours = compared.ours
    return f"{compared.regime}: {ours.goodput:.1%} {ours.ttft_mean_s:.2f} s; {others} ({since_s:.0f} s)"
