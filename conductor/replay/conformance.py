"""A live run beside its simulation: `conductor replay DECISIONS.jsonl --conformance`.

A live cluster's decision log holds what was asked, when, what was decided on which numbers,
and what came of it. From it this module makes two comparisons:

* every decision is made again from the numbers it was made on: the same code must give the
  same placement, to the bit;
* the whole run is simulated, from the arrivals alone, with as many nodes and a profile: what
  comes out is compared with what happened.

Requests that were refused are simulated too, each with the mean output of those that were served.

The second is only as good as the profile, so a profile should be one measured on the nodes
(`conductor profile`), or fitted to another run of theirs (`conductor profile --from-log`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from base.config import EngineConfig
from base.errors import ConfigError, SloUnreachableError
from base.request import RequestId
from conductor.placing.cost_model import CostModel
from conductor.placing.decision_lines import Shared
from conductor.placing.decisions import Actual, Decision, NodeSeen, decide_again
from conductor.placing.placement import Placement, Rejection
from conductor.placing.profile import Profile
from conductor.replay.cluster import SimCluster
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.decision_log import read_log, request_of
from conductor.replay.outcome import Outcomes
from conductor.replay.simulate import Plan, simulate
from conductor.replay.trace import NamedBounds, Trace, TraceRequest

SHIPPED_ENGINE = EngineConfig()

REFUSED_LATE = SloUnreachableError.__name__
"""End of an attempt whose decode node had no time for it any more when its prompt was computed."""


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """One request of a live run that was served."""

    made: Decision
    placed: Placement
    actual: Actual

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were found in a cache."""
        return self.actual.num_cached_tokens or 0


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A decision log: all its decisions, the requests served at the first attempt, and those refused."""

    shared: Shared
    decisions: Sequence[Decision]
    served: Sequence[LiveRequest]
    """The requests, by arrival."""
    refused: Sequence[Decision] = ()
    """The first decisions of requests that were refused, at once or when their prompts were computed, by
    arrival."""

    def nodes(self) -> tuple[int, int, int]:
        """Return how many nodes prefilled, decoded, and did both, when there first were most.

        Raises:
            ConfigError: no decision was recorded with its nodes.
        """
        if not (nodes := self._most_nodes()):
            raise ConfigError("decisions without nodes: clusters of 64 nodes at most are recorded with them")
        # roles change afterwards: each role's most would be more nodes than there were
        roles = [(node.prefills, node.decodes) for node in nodes]
        return roles.count((True, False)), roles.count((False, True)), roles.count((True, True))

    def chunk_tokens(self) -> int:
        """Return how many tokens of prompts a step of the nodes had at most, of the largest; 0: not said."""
        return max((node.chunk_tokens for node in self._most_nodes()), default=0)

    def _most_nodes(self) -> tuple[NodeSeen, ...]:
        """Return the nodes when there first were most; empty: no decision was recorded with them."""
        return max((made.seen.nodes or () for made in self.decisions), key=len, default=())

    def arrivals(self) -> list[tuple[Decision, int]]:
        """Return what was asked, by arrival, with the output of each: the mean where it was refused."""
        mean = max(1, round(fmean(request.actual.num_output_tokens for request in self.served)))
        asked = [(request.made, request.actual.num_output_tokens) for request in self.served]
        asked += [(made, min(mean, made.asked.max_tokens)) for made in self.refused]
        return sorted(asked, key=lambda row: row[0].arrived_at_s)

    def trace(self) -> Trace:
        """Return what was asked as a trace, from the first arrival on."""
        asked = self.arrivals()
        first_s = asked[0][0].arrived_at_s
        # of another attempt, whose first token is out, no bounds are kept
        firsts = {request_of(made.asked.request_id): made.asked.slo for made in self.decisions}
        rows = [
            TraceRequest(
                made.arrived_at_s - first_s,
                made.asked.num_tokens,
                output_tokens,
                made.asked.chain,  # type: ignore[arg-type]  # any hashable names a block
                priority=made.asked.priority,
                bounds=NamedBounds(*firsts.get((request_of(made.asked.request_id)[0], 1), made.asked.slo)),
            )
            for made, output_tokens in asked
        ]
        return Trace("live", self.served[0].made.seen.block_size, rows)


def read_run(path: Path) -> LiveRun:
    """Read a decision log.

    Raises:
        ConfigError: it is no decision log, or nothing was served in it.
    """
    shared, items = read_log(path)
    decisions: dict[RequestId, Decision] = {}
    served, refused = list[LiveRequest](), list[Decision]()
    for item in items:
        if isinstance(item, Decision):
            decisions[item.asked.request_id] = item
            continue
        request_id, actual = item
        made = decisions.get(request_id)
        if made is None:
            continue  # it stands in the file that this one began after
        if actual.end == "finished" and actual.ttft_s is not None and isinstance(made.result, Placement):
            served.append(LiveRequest(made, made.result, actual))
        elif actual.end == REFUSED_LATE:
            refused.append(made)
    served.sort(key=lambda request: request.made.arrived_at_s)
    if not served:
        raise ConfigError(f"{path}: no request was served in it")
    refused += [made for made in decisions.values() if isinstance(made.result, Rejection)]
    firsts = [made for made in refused if request_of(made.asked.request_id)[1] == 1]
    firsts.sort(key=lambda made: made.arrived_at_s)
    return LiveRun(shared, list(decisions.values()), served, firsts)


def num_made_alike(run: LiveRun) -> int:
    """Return how many decisions, made again from what they were made on, come out the same to the bit."""
    cost = CostModel(run.shared.profile)
    return sum(decide_again(made, cost, run.shared.settings) == made.result for made in run.decisions)


def simulated(run: LiveRun, profile: Profile, engine: EngineConfig = SHIPPED_ENGINE) -> SimCluster:
    """Return the cluster after a simulation of the run's arrivals with the run's nodes.

    `engine`: of their steps. Where it does not say `chunk_tokens`, the log does; one that does not either has
    the default of the profile's device.
    """
    on_gpu = profile.launches_ahead
    chunk_tokens = engine.chunk_tokens or run.chunk_tokens() or engine.prompt_tokens(on_gpu)
    prefill, decode, both = run.nodes()
    trace, settings = run.trace(), run.shared.settings
    policy = settings.policy if settings.fetches else "local"
    options = ClusterOptions(
        prefill,
        decode,
        trace.block_size,
        policy,
        None,
        settings,
        learns=True,
        both_nodes=both,
        chunk_tokens=chunk_tokens,
        max_batch=engine.sequences(on_gpu),
        decode_caches=True,
        # a conductor predicted by the profile that its log names, whatever its nodes take
        believed=run.shared.profile,
    )
    return simulate(Plan(trace, CostModel(profile), options))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure of both."""

    name: str
    live: float
    simulated: float

    @property
    def error(self) -> float:
        """The relative error of the simulation."""
        return self.simulated / self.live - 1 if self.live else float(self.simulated != 0)


def compared(run: LiveRun, outcomes: Outcomes) -> list[Comparison]:
    """Return the measures of a live run and of its simulation. Seconds, but for tokens."""
    live_ttft_s = [request.actual.ttft_s or 0.0 for request in run.served]
    live_tbt_s = [request.actual.mean_tbt_s for request in run.served if request.actual.mean_tbt_s]
    our_tbt_s = [seconds for seconds in outcomes.mean_tbt_s if seconds]
    return [
        Comparison("TTFT mean", fmean(live_ttft_s), fmean(outcomes.ttft_s)),
        *(
            Comparison(f"TTFT p{percent}", ranked(live_ttft_s, percent), ranked(outcomes.ttft_s, percent))
            for percent in (50, 99)
        ),
        *(
            Comparison(f"TBT p{percent}", ranked(live_tbt_s, percent), ranked(our_tbt_s, percent))
            for percent in (50, 99)
        ),
        Comparison("refused", float(len(run.refused)), float(outcomes.num_rejected)),
        Comparison(
            "hit tokens", sum(request.cached_tokens for request in run.served), sum(outcomes.prefix_tokens)
        ),
    ]


def ranked(values: Sequence[float], percent: int) -> float:
    """Return a percentile, nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[round(percent / 100 * (len(ordered) - 1))] if ordered else 0.0


def comparison_rows(run: LiveRun, comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return a table of it for people."""
    rows = [["", "live", "simulated", "error"]]
    for each in comparisons:
        shown = "{:.0f}" if each.name in ("hit tokens", "refused") else "{:.4f}"
        rows.append([each.name, shown.format(each.live), shown.format(each.simulated), f"{each.error:+.1%}"])
    alike, count = num_made_alike(run), len(run.decisions)
    rows.append(["decisions made again alike", str(count), str(alike), f"{alike / count - 1:+.1%}"])
    return rows
