"""Where another placement rule beats ours, and by how much.

    python -m bench.regimes                         # every regime, seeds that nobody tuned to, losses first
    python -m bench.regimes --seeds tune            # the seeds that the rule may be tuned on
    python -m bench.regimes --only "agents, 70B" --full     # one row at its whole length
    python -m bench.regimes --smoke                 # a few regimes and requests: whether it runs

Every rule meets the same requests in the same cluster, with the settings that the service ships: its queue,
its headroom and what it learns. Goodput is the share of all requests that had their first token and their
tokens in time; one that was rejected had not. Only the choice of the prefill node differs; where `late` and
`early` are named, only the kind of rejection.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from bench.about_run import about_run
from bench.regimes.table import FULL_REQUESTS, REQUESTS, Regime, regimes
from conductor.replay.outcome import distribution
from conductor.replay.report import aligned
from conductor.replay.simulate import simulate
from conductor.replay.trace import Trace

OURS = "global"
SEEDS = {"tune": (1, 2), "test": (11, 12)}
TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
SMOKE_REQUESTS = 60


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


def score(regime: Regime, rule: str, traces: Mapping[int, Trace]) -> Score:
    """Return the means over the seeds that the traces are of."""
    goodput, mean_s, p99_s, rejected, hits = [], [], [], [], []
    for seed, trace in traces.items():
        outcomes = simulate(regime.plan(trace, rule, seed)).outcomes
        ttft_s = distribution(outcomes.ttft_s)
        goodput.append(outcomes.share_within(regime.slo.ttft_slo_s, regime.slo.tbt_slo_s))
        mean_s.append(ttft_s["mean"])
        p99_s.append(ttft_s["p99"])
        rejected.append(outcomes.num_rejected / max(1, outcomes.num_arrived))
        hits.append(outcomes.hit_rate_tokens())
    return Score(rule, *map(fmean, (goodput, mean_s, p99_s, rejected, hits)))


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


def compare(regime: Regime, requests: int, seeds: Sequence[int], rivals: Sequence[str] = ()) -> Compared:
    """Run a regime under every rule."""
    traces = {seed: regime.make(requests, seed) for seed in seeds}
    scores = [score(regime, rule, traces) for rule in rivals or regime.rivals]
    scores.sort(key=lambda each: (-each.goodput, each.ttft_mean_s))
    return Compared(regime.name, score(regime, OURS, traces), tuple(scores))


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
    add("--full", action="store_true", help=f"{FULL_REQUESTS} requests of each regime, not {REQUESTS}")
    add("--smoke", action="store_true", help=f"{SMOKE_REQUESTS} requests of every tenth regime")
    add("--traces", type=Path, default=TRACES, metavar="FOLDER", help="with conversation_trace.jsonl")
    add("--out", type=Path, metavar="OUT.json")
    args = parser.parse_args(argv)
    chosen = [each for each in regimes(args.traces) if not args.only or args.only in each.name]
    if not chosen:
        parser.error(f"--only {args.only!r}: in no regime's name")
    requests = FULL_REQUESTS if args.full else REQUESTS
    if args.smoke:
        chosen, requests = chosen[::10], SMOKE_REQUESTS
    compared = []
    for regime in chosen:
        started_s = time.process_time()
        compared.append(compare(regime, requests, SEEDS[args.seeds], args.rules))
        print(_line(compared[-1], time.process_time() - started_s), file=sys.stderr, flush=True)
    print(aligned(rows_of(compared)))
    lost = [each for each in compared if each.lead < -0.03]
    print(
        f"\n{len(lost)} of {len(compared)} regimes where another rule has 3 points of goodput more than ours"
    )
    if args.out:
        result = {"about": about_run(), "requests": requests, "seeds": SEEDS[args.seeds], "lost": len(lost)}
        result["regimes"] = [
            asdict(each) | {"lead": each.lead} for each in sorted(compared, key=lambda one: one.lead)
        ]
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _line(compared: Compared, cpu_s: float) -> str:
    others = ", ".join(f"{each.rule} {each.goodput:.1%} {each.ttft_mean_s:.2f}" for each in compared.others)
    ours = compared.ours
    return f"{compared.regime}: {ours.goodput:.1%} {ours.ttft_mean_s:.2f} s; {others} ({cpu_s:.0f} s)"
