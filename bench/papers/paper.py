"""The papers' experiments, each with the published row beside ours.

F is FAST'25 ("Mooncake: Trading More Storage for Less Computation"), A is arXiv
2407.00079. The paper's cluster is the profile `a800-llama70b`. An experiment runs on the trace
that is given, with what was published on that trace (`published.py`) or nothing beside it;
`conductor replay synthetic --paper fig15` imitates one that is not at hand.

What the papers do not state and what stands for it here: the split of the 16 nodes of
F Fig. 5 (two splits are shown); what a "local" cache is in F Fig. 10 (both readings are
shown); the trace of A Table 3 (any, at a decode-bound split).
"""

from __future__ import annotations

import dataclasses
import statistics
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from statistics import fmean, pstdev

from base.distribution import distribution
from base.request import Slo
from bench.papers.published import (
    FIG5,
    FIG8,
    FIG9,
    FIG9_MILLIONS,
    FIG10,
    FIG13,
    FIG13_GBPS,
    FIG13_RECOMPUTED_S,
    FIG15_CAPACITY,
    FIG15_TBT_MS,
    FIG15_TTFT_S,
    known_trace,
)
from conductor.placing.cost_model import CostModel
from conductor.placing.prefill_policies import fewest_seconds
from conductor.placing.profile import Profile
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from conductor.replay.block_cache import LruCache
from conductor.replay.cluster import SimCluster
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.outcome import Outcomes
from conductor.replay.policies import PAPER_POLICIES as POLICIES
from conductor.replay.simulate import Plan, simulate
from conductor.replay.trace import DEFAULT_BLOCK_SIZE, Trace, TraceRequest

Row = list[str]

UNLIMITED_TOKENS = 1 << 40

TABLE3_TBT_S = (0.04, 0.055, 0.07)
"""The bound of A Table 3 is for another trace; these leave from a half to a tenth to be rejected."""
ROUNDED_TO_S = 3.0
"""What the public trace rounds its arrivals to: up to 28 requests at a time."""


@dataclass(frozen=True, slots=True)
class Table:
    """An experiment's result: a heading, and rows of which the first names the columns."""

    heading: str
    rows: list[Row]


def fig5(trace: Trace, profile: Profile) -> Table:
    """Mean TTFT of four policies."""
    rows = [["split", *POLICIES, "", *(f"{name}/global" for name in POLICIES)]]
    if published := FIG5.get(known_trace(trace) or ""):
        rows.append(_with_ratios("paper (not stated)", list(published)))
    for prefill, decode in ((8, 8), (7, 9)):
        means = [_mean_ttft_s(_run(trace, profile, prefill, decode, policy=policy)) for policy in POLICIES]
        rows.append(_with_ratios(f"ours {prefill}P{decode}D", means))
    return Table(f"F Fig. 5: mean TTFT (s), 16 nodes, {trace.name}", rows)


def fig8(trace: Trace, profile: Profile) -> Table:
    """Mean seconds of prefill a request, without a cache and with one that holds everything."""
    rows = [["", "no cache", "unlimited cache", "saved"]]
    ours = mean_prefill_s(trace, profile, 0), mean_prefill_s(trace, profile, UNLIMITED_TOKENS)
    published = FIG8.get(known_trace(trace) or "")
    named = [("paper ~", published)] if published else []
    for name, (none_s, all_s) in [*named, ("ours", ours)]:
        rows.append([name, f"{none_s:.3f}", f"{all_s:.3f}", f"{1 - all_s / none_s:.0%}"])
    if published:
        errors = [f"{mine / paper - 1:+.1%}" for mine, paper in zip(ours, published, strict=True)]
        rows.append(["error", *errors, ""])
    return Table(f"F Fig. 8: prefill seconds a request, {trace.name}", rows)


def fig9(trace: Trace, profile: Profile) -> Table:
    """Hit rate of one global cache by its capacity."""
    published = FIG9.get(known_trace(trace) or "", {})
    sizes = tuple(published) or FIG9_MILLIONS
    rows = [["million tokens", *map(str, sizes)]]
    ours = [hit_rate(trace, millions * 1_000_000) for millions in sizes]
    if published:
        rows.append(["paper ~", *(f"{value:.3f}" for value in published.values())])
    rows.append(["ours", *(f"{value:.3f}" for value in ours)])
    if published:
        errors = [value - paper for value, paper in zip(ours, published.values(), strict=True)]
        rows.append(["difference", *(f"{error:+.3f}" for error in errors)])
    return Table(f"F Fig. 9: token hit rate of one LRU cache, {trace.name}", rows)


def fig10(trace: Trace, profile: Profile) -> Table:
    """Local against global cache: 10 prefill nodes of 3M tokens, outputs of one token."""
    rows = [["", "hit rate", "to global", "prefill s"]]
    if published := FIG10.get(known_trace(trace) or ""):
        local, all_of_them, local_s, global_s = published
        rows.append(["paper local", f"{local:.1%}", f"{all_of_them / local:.2f}x", f"{local_s:.2f}"])
        rows.append(["paper global", f"{all_of_them:.1%}", "", f"{global_s:.2f}"])
    sized = dataclasses.replace(profile, host_kv_tokens=3_000_000)
    runs = [
        _run(trace, sized, 10, 1, policy=policy, output_limit=1) for policy in ("load", "local", "global")
    ]
    names = ("local, placed by load", "local, cache-aware", "global")
    best = runs[-1].outcomes.hit_rate_tokens()
    for name, cluster in zip(names, runs, strict=True):
        hit = cluster.outcomes.hit_rate_tokens()
        rows.append([name, f"{hit:.1%}", _times(best, hit), f"{cluster.outcomes.mean_prefill_s():.3f}"])
    alone = hit_rate(trace, 3_000_000)
    rows.append(["one node's cache, whole trace", f"{alone:.1%}", _times(best, alone), ""])
    return Table(f"F Fig. 10: local and global cache, {trace.name}", rows)


def _times(more: float, less: float) -> str:
    return f"{more / less:.2f}x" if less else "-"


def fig13(trace: Trace, profile: Profile) -> Table:
    """Mean TTFT by network bandwidth."""
    rows = [["Gbps", *map(str, FIG13_GBPS), "no fetching"]]
    known = known_trace(trace) or ""
    if published := FIG13.get(known):
        paper = [f"{value:.2f}" for value in published.values()]
        rows.append(["paper ~", *paper, f"{FIG13_RECOMPUTED_S[known]:.2f}"])
    for speed in (1.0, 1.1, 1.2):
        ours = []
        for gbps in FIG13_GBPS:
            slow = dataclasses.replace(profile, transfer_bytes_per_s=gbps * 0.87 * 1e9 / 8)
            ours.append(_mean_ttft_s(_run(trace, slow, 8, 8, speed=speed)))
        without = _mean_ttft_s(_run(trace, profile, 8, 8, policy="local", speed=speed))
        rows.append([f"ours, speed {speed:g}", *(f"{value:.2f}" for value in ours), f"{without:.2f}"])
    return Table(f"F Fig. 13: mean TTFT (s) by bandwidth, 8P8D, {trace.name}", rows)


def fig15(trace: Trace, profile: Profile) -> Table:
    """TTFT, TBT and effective capacity by the split of 16 nodes."""
    slo, splits, known = Slo(10.0, 0.1), range(5, 12), known_trace(trace) or ""
    rows = [["16 nodes", *(f"{prefill}P{16 - prefill}D" for prefill in splits)]]
    published = {"TTFT s": FIG15_TTFT_S, "TBT ms": FIG15_TBT_MS, "capacity %": FIG15_CAPACITY}
    if known in FIG15_TTFT_S:
        rows += [[f"paper {what}", *map(str, by_trace[known])] for what, by_trace in published.items()]
    for speed in (1.0, 1.1, 1.2):
        runs = [_run(trace, profile, prefill, 16 - prefill, speed=speed) for prefill in splits]
        name = f"ours, speed {speed:g},"
        rows.append([f"{name} TTFT s", *(f"{_mean_ttft_s(run):.2f}" for run in runs)])
        rows.append([f"{name} TBT ms", *(f"{1e3 * _mean(run.outcomes.tbt_s):.1f}" for run in runs)])
        shares = [run.outcomes.share_within(slo.ttft_slo_s, slo.tbt_slo_s) for run in runs]
        rows.append([f"{name} capacity %", *(f"{100 * share:.1f}" for share in shares)])
    return Table(f"F Fig. 15: prefill/decode splits, TTFT 10 s, TBT 100 ms, {trace.name}", rows)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def table3(trace: Trace, profile: Profile) -> Table:
    """Rejections by when decode load is tested."""
    rows = [["", "rejected", "to late", "wasted prefill s", "goodput", "TTFT s"]]
    for name, rejected in zip(("late", "early", "predict"), (4183, 3771, 3589), strict=True):
        change = "" if name == "late" else f"{rejected / 4183 - 1:+.1%}"
        rows.append([f"paper {name}, another trace", str(rejected), change, "", "", ""])
    for tbt_slo_s in TABLE3_TBT_S:
        late = 0
        for reject in (RejectPolicy.LATE, RejectPolicy.EARLY, RejectPolicy.PREDICT):
            slo = Slo(30.0, tbt_slo_s)
            settings = SchedulerSettings(reject=reject, roles_follow=False)
            options = ClusterOptions(10, 2, trace.block_size, settings=settings, slo=slo)
            cluster = simulate(Plan(trace, CostModel(profile), options, speed=2.0, jitter_s=ROUNDED_TO_S))
            outcomes = cluster.outcomes
            late = late or outcomes.num_rejected
            good = outcomes.share_within(slo.ttft_slo_s, slo.tbt_slo_s)
            rows.append(
                [
                    f"ours, TBT {1e3 * tbt_slo_s:.0f} ms, {reject.value}",
                    str(outcomes.num_rejected),
                    f"{outcomes.num_rejected / late - 1:+.1%}",
                    f"{outcomes.wasted_prefill_s:.0f}",
                    f"{good:.1%}",
                    f"{_mean_ttft_s(cluster):.2f}",
                ]
            )
    return Table(f"A Table 3: rejections at 2x, decode-bound (10P2D), {trace.name}", rows)


def anti_phase(trace: Trace, profile: Profile) -> Table:
    """A Fig. 9 and 10: load of both pools over time, under each way of rejecting."""
    heads = ["", "rejected", "late", "correlation", "queue s", "deviation", "step ms", "deviation"]
    rows = [[*heads, "period s", "autocorrelation"]]
    for reject, retests in SWINGS:
        runs = [saturated(trace, profile, reject, retests, seed) for seed in range(SWING_RUNS)]
        outcomes, found = [run.outcomes for run in runs], [loads(run) for run in runs]
        period, height = swing([step_s for _, step_s in found])
        rows.append(
            [
                reject.value if retests else f"{reject.value}, tested once",
                f"{fmean(each.num_rejected for each in outcomes):.0f}",
                f"{fmean(each.rejections['tbt_late'] for each in outcomes):.0f}",
                f"{fmean(correlation(*pair) for pair in found):+.2f}",
                f"{fmean(fmean(queue_s) for queue_s, _ in found):.2f}",
                f"{fmean(pstdev(queue_s) for queue_s, _ in found):.2f}",
                f"{1e3 * fmean(fmean(step_s) for _, step_s in found):.1f}",
                f"{1e3 * fmean(pstdev(step_s) for _, step_s in found):.2f}",
                f"{period * SAMPLE_S:.0f}",
                f"{height:+.2f}",
            ]
        )
    heading = "A Fig. 9 and 10: load of both pools, both saturated"
    return Table(f"{heading} (12P3D, 5x, TBT 64 ms, mean of {SWING_RUNS} runs)", rows)


SWINGS = (
    (RejectPolicy.EARLY, False),
    (RejectPolicy.PREDICT, False),
    (RejectPolicy.LATE, True),
    (RejectPolicy.EARLY, True),
    (RejectPolicy.PREDICT, True),
)
SWING_RUNS = 3
SAMPLE_S = 1.0
DRIFT_S = 180.0
"""What changes slower is the trace's own."""
LONGEST_PERIOD_S = 100.0


def saturated(trace: Trace, profile: Profile, reject: RejectPolicy, retests: bool, seed: int) -> SimCluster:
    """Return a finished run in which both pools have too much to do, with samples of their load.

    The trace's own bursts would swing too, so arrivals are spread, by `seed`.
    """
    options = ClusterOptions(
        12,
        3,
        trace.block_size,
        settings=SchedulerSettings(reject=reject, roles_follow=False),
        retests=retests,
        slo=Slo(30.0, 0.064),
        sample_every_s=SAMPLE_S,
        seed=seed,
    )
    return simulate(Plan(trace, CostModel(profile), options, speed=5.0, jitter_s=ROUNDED_TO_S, limit=10_000))


def loads(cluster: SimCluster) -> tuple[list[float], list[float]]:
    """Return seconds of prefill queued and of a decode step, without filling and emptying of the cluster."""
    samples = cluster.samples[len(cluster.samples) // 10 : -len(cluster.samples) // 6]
    return [sample[1] for sample in samples], [sample[2] for sample in samples]


def swing(loads: list[list[float]]) -> tuple[int, float]:
    """Return the period of a load in samples, and its autocorrelation there: near 0, it has none.

    Of several runs, the mean. What drifts is taken out; the period is the highest lag past the lowest one.
    """
    half = round(DRIFT_S / SAMPLE_S / 2)
    bare = [
        [value - fmean(load[max(0, at - half) : at + half + 1]) for at, value in enumerate(load)]
        for load in loads
    ]
    lags = range(1, round(LONGEST_PERIOD_S / SAMPLE_S))
    alike = {lag: fmean(correlation(load[:-lag], load[lag:]) for load in bare) for lag in lags}
    trough = min(alike, key=alike.__getitem__)
    period = max((lag for lag in lags if lag >= trough), key=alike.__getitem__)
    return period, alike[period]


def fig12_arxiv(trace: Trace, profile: Profile) -> Table:
    """Highest rate within the SLO, 3P1D against four colocated nodes, prompts half cached."""
    published = {16: (1.25, 0.2), 32: (0.6, 0.2), 64: (0.3, 0.2), 128: (0.14, 0.12)}
    rows = [["", *(f"{thousands}k" for thousands in published), ""]]
    for place, name in enumerate(("paper 3P1D (highest tested)", "paper vLLM 4M")):
        rows.append([name, *(f"{pair[place]:.2f}" for pair in published.values()), "requests/s"])
    ours = {"ours 3P1D": _disaggregated, "ours colocated 4C": _colocated}
    found = {
        name: [highest_rate(lambda rate: run(halves(1024 * k, rate), profile)) for k in published]  # noqa: B023
        for name, run in ours.items()
    }
    rows += [[name, *(f"{rate:.2f}" for rate in rates), "requests/s"] for name, rates in found.items()]
    gains = [split / together - 1 for split, together in zip(*found.values(), strict=True)]
    rows.append(["gain", *(f"{gain:+.0%}" for gain in gains), "paper +525 % ... +17 %"])
    return Table("A Fig. 12: rate with P90 TTFT <= 10x and P90 TBT <= 5x those at the lowest rate", rows)


def halves(num_tokens: int, rate: float) -> Trace:
    """Return Poisson arrivals of prompts whose first half is one of a few, with outputs of 512 tokens."""
    rng = Random(f"halves {num_tokens}")
    half = num_tokens // 2 // DEFAULT_BLOCK_SIZE
    now_s, requests = 0.0, []
    for number in range(HALVES):
        now_s += rng.expovariate(1.0) / rate
        base, own = rng.randrange(BASES) * half, (BASES + number) * half
        chain = (*range(base, base + half), *range(own, own + half))
        requests.append(TraceRequest(now_s, num_tokens, 512, chain))
    return Trace(f"{num_tokens} tokens, half cached", DEFAULT_BLOCK_SIZE, requests)


def highest_rate(run: Callable[[float], Outcomes]) -> float:
    """Return the highest rate, of steps of an eighth, that keeps the bounds the lowest one sets."""
    lowest = run(LOWEST_RATE)
    ttft_s, tbt_s = 10 * _p90(lowest, lowest.ttft_s), 5 * _p90(lowest, lowest.tbt_s)
    best = rate = LOWEST_RATE
    while rate < HIGHEST_RATE:
        rate *= 1.125
        outcomes = run(rate)
        if _p90(outcomes, outcomes.ttft_s) > ttft_s or _p90(outcomes, outcomes.tbt_s) > tbt_s:
            break
        best = rate
    return best


def _p90(outcomes: Outcomes, values: array[float]) -> float:
    """Return the 90th percentile of all that arrived: who was refused has waited for ever."""
    return distribution(values + array("d", [inf]) * outcomes.num_rejected)["p90"]


LOWEST_RATE, HIGHEST_RATE = 0.02, 10.0
HALVES, BASES = 160, 4


def _disaggregated(trace: Trace, profile: Profile) -> Outcomes:
    return _run(trace, profile, 3, 1).outcomes


def _colocated(trace: Trace, profile: Profile) -> Outcomes:
    return _run(trace, profile, 4, 0, policy="local").outcomes


EXPERIMENTS: dict[str, Callable[[Trace, Profile], Table]] = {
    "fig5": fig5,
    "fig8": fig8,
    "fig9": fig9,
    "fig10": fig10,
    "fig13": fig13,
    "fig15": fig15,
    "table3": table3,
    "fig9-arxiv": anti_phase,
    "fig12-arxiv": fig12_arxiv,
}


def mean_prefill_s(trace: Trace, profile: Profile, cache_tokens: int) -> float:
    """Return the mean seconds of prefill with one cache of so many tokens for all nodes."""
    cost = CostModel(profile)
    return fmean(
        cost.prefill_s(num_tokens - prefix, prefix) for num_tokens, prefix in _prefixes(trace, cache_tokens)
    )


def hit_rate(trace: Trace, cache_tokens: int) -> float:
    """Return matched over all prompt tokens with one cache of so many tokens."""
    pairs = _prefixes(trace, cache_tokens)
    return sum(prefix for _, prefix in pairs) / sum(num_tokens for num_tokens, _ in pairs)


def correlation(first: list[float], second: list[float]) -> float:
    """Return Pearson's correlation; 0 where one of them is constant."""
    is_constant = len(set(first)) < 2 or len(set(second)) < 2
    return 0.0 if is_constant else statistics.correlation(first, second)


def _prefixes(trace: Trace, cache_tokens: int) -> list[tuple[int, int]]:
    """Return (prompt tokens, matched tokens) of each request against one LRU cache."""
    cache = LruCache(cache_tokens // trace.block_size)
    pairs = []
    for request in trace.requests:
        matched = cache.match(request.chain) * trace.block_size
        pairs.append((request.num_tokens, min(matched, request.num_tokens - 1)))
        cache.store(request.chain)
    return pairs


def _run(
    trace: Trace, profile: Profile, prefill: int, decode: int, *, speed: float = 1.0, **options: object
) -> SimCluster:
    # the papers' rule is ours but for what is done past capacity
    rule = fewest_seconds if options.get("policy", "global") in ("global", "local") else None
    chosen = ClusterOptions(prefill, decode, trace.block_size, rule=rule, **options)  # type: ignore[arg-type]
    return simulate(Plan(trace, CostModel(profile), chosen, speed))


def _mean_ttft_s(cluster: SimCluster) -> float:
    return distribution(cluster.outcomes.ttft_s)["mean"]


def _with_ratios(name: str, means: list[float]) -> Row:
    ratios = [mean / means[-1] for mean in means]
    return [name, *(f"{mean:.2f}" for mean in means), "", *(f"{ratio:.2f}" for ratio in ratios)]
