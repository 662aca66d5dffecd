"""Small traces and clusters for the replay's tests."""

from pathlib import Path

from base.request import Slo
from bench.papers.generate import generate
from conductor.placing.cost_model import CostModel
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from conductor.profiles.reader import load_profile
from conductor.replay.cluster import SimCluster
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.simulate import Plan, simulate
from conductor.replay.trace import Trace

SHARED_TRACE = Path(__file__).parents[3].parent / "shared" / "traces" / "conversation_trace.jsonl"


def small_trace(num_requests: int = 300, rate: float = 3.4, seed: int = 0) -> Trace:
    return generate("conversation", num_requests, rate, seed)


def run(
    trace: Trace, nodes: str = "4P4D", speed: float = 1.0, reject=RejectPolicy.NONE, **options
) -> SimCluster:
    prefill, decode = nodes.rstrip("D").split("P")
    cost = CostModel(load_profile("a800-llama70b"))
    options.setdefault("settings", SchedulerSettings(reject=reject))
    chosen = ClusterOptions(int(prefill), int(decode), trace.block_size, **options)
    return simulate(Plan(trace, cost, chosen, speed))


TIGHT = Slo(ttft_slo_s=8.0, tbt_slo_s=0.045)

REJECTING = [policy for policy in RejectPolicy if policy is not RejectPolicy.NONE]
