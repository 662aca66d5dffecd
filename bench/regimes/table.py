"""The regimes: a workload, a load, a cluster and bounds in each row. Nothing in `conductor/` reads it.

Loads were chosen so that the better rules serve a part of the requests within the bounds and the worse ones
fewer: where everything is in time, and where nothing is, rules do not differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from random import Random

from base.config import SchedulerConfig
from base.request import Slo
from bench.papers.generate import generate
from bench.papers.peers import RULES, peer_policy
from bench.regimes.sessions import AgentKind, MixKind, agents, mix
from conductor.placing.cost_model import CostModel
from conductor.placing.profile import Profile, slowed
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from conductor.profiles.reader import load_profile
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.simulate import Plan
from conductor.replay.trace import Trace
from conductor.replay.trace_formats import read_trace

SERVICE = SchedulerConfig()
A800, H200 = "a800-llama70b", "h200-llama8b"

REQUESTS = 2_500
"""Rows of a short run of a regime."""
FULL_REQUESTS = 12_000

MakeTrace = Callable[[int, int], Trace]
"""(requests, seed) to a trace."""


TALK = Slo(10.0, 0.1)
AGENTS = Slo(2.0, 0.030)
ANSWERS = Slo(1.0, 0.03)
QUICK = Slo(0.5, 0.03)
GBIT = 125e6


@dataclass(frozen=True)
class Regime:
    """One row."""

    name: str
    make: MakeTrace
    nodes: tuple[int, int]
    profile: str = A800
    slo: Slo = TALK
    reject: RejectPolicy = RejectPolicy.NONE
    speed: float = 1.0
    cache_tokens: int | None = None
    """Tokens of KV in each node's host memory."""
    eviction: str = "lru"
    """A policy of `kvstore/eviction.py`."""
    link_bytes_per_s: float | None = None
    slow: float = 1.0
    """How many times slower half of the nodes are, of each role."""
    believed: float = 1.0
    """The conductor predicts with a profile that is so many times slower than the nodes."""
    view_delay_s: float = 0.0
    is_plain: bool = False
    """Whether it is placed as in the papers: at once, and nothing is learned."""
    roles_follow: bool = False
    """Whether roles follow the load, as the service ships; else rivals and ours have pools."""
    rivals: tuple[str, ...] = (*RULES, "local", "load")

    def plan(self, trace: Trace, rule: str, seed: int) -> Plan:
        """Return what to simulate: `rule` is a peer's, a policy of replay or a kind of rejection."""
        profile = load_profile(self.profile)
        if self.cache_tokens is not None:
            profile = dataclasses.replace(profile, host_kv_tokens=self.cache_tokens)
        if self.link_bytes_per_s is not None:
            profile = dataclasses.replace(profile, transfer_bytes_per_s=self.link_bytes_per_s)
        options = ClusterOptions(
            prefill_nodes=self.nodes[0],
            decode_nodes=self.nodes[1],
            block_size=trace.block_size,
            policy="global" if rule in KINDS else rule,
            rule=peer_policy(rule) if rule in RULES else None,
            settings=self._settings(KINDS.get(rule, self.reject)),
            learns=not self.is_plain,
            slo=self.slo,
            eviction=self.eviction,
            view_delay_s=self.view_delay_s,
            slow_nodes=self._slow_nodes(),
            believed=self._believed(profile),
            seed=seed,
        )
        return Plan(trace, CostModel(profile), options, self.speed, jitter_s=3.0)

    def _settings(self, reject: RejectPolicy) -> SchedulerSettings:
        settings = SchedulerSettings(reject=reject, roles_follow=self.roles_follow)
        if self.is_plain:
            return settings
        return dataclasses.replace(settings, ttft_headroom=SERVICE.ttft_headroom, ahead_s=SERVICE.ahead_s)

    def _slow_nodes(self) -> tuple[tuple[str, float], ...]:
        if self.slow == 1.0:
            return ()
        prefill, decode = self.nodes
        names = [f"p{number}" for number in range(0, prefill, 2)]
        names += [f"d{number}" for number in range(0, decode, 2)]
        return tuple((name, self.slow) for name in names)

    def _believed(self, profile: Profile) -> Profile | None:
        return slowed(profile, self.believed) if self.believed != 1.0 else None


KINDS = {"late": RejectPolicy.LATE, "early": RejectPolicy.EARLY}
"""Rivals that are our own rule with another kind of rejection."""


_read = lru_cache(1)(read_trace)


def conversation(folder: Path) -> MakeTrace:
    """Return what cuts a part out of the public trace, from a row that the seed chooses; else imitates it."""
    path = folder / "conversation_trace.jsonl"

    def make(requests: int, seed: int) -> Trace:
        if not path.exists():
            return generate("conversation", requests, 3.4, seed)
        whole = _read(path)
        rows = whole.requests
        first = Random(seed).randrange(max(1, len(rows) - requests + 1))
        part = rows[first : first + requests]
        began_s = part[0].arrival_s
        moved = [row._replace(arrival_s=row.arrival_s - began_s) for row in part]
        return dataclasses.replace(whole, requests=moved)

    return make


def _generated(workload: str, rate: float, burstiness: float = 1.0) -> MakeTrace:
    return lambda requests, seed: generate(workload, requests, rate, seed, burstiness)


def _agents(rate: float, is_closed: bool, **changes: float) -> MakeTrace:
    kind = dataclasses.replace(AgentKind(), **changes)  # type: ignore[arg-type]
    return lambda requests, seed: agents(kind, requests, rate, seed, is_closed)


def _mix(kind: MixKind, rate: float, times: int = 1) -> MakeTrace:
    """Return what makes so many times the requests of other regimes: hundreds a second would end too soon."""
    return lambda requests, seed: mix(kind, times * requests, rate, seed)


def regimes(traces: Path) -> list[Regime]:
    """Return every regime; `traces` is a folder with public traces, or without."""
    talk = conversation(traces)
    conv = partial(Regime, make=talk)
    agent = partial(Regime, profile=H200, slo=AGENTS)
    rows = [
        # the public trace: loads, splits, sizes
        conv("conversation, 8P8D", nodes=(8, 8)),
        conv("conversation, 8P8D, 1.3x", nodes=(8, 8), speed=1.3),
        conv("conversation, 6P10D", nodes=(6, 10)),
        conv("conversation, 4P4D, 0.6x", nodes=(4, 4), speed=0.6),
        conv("conversation, 16P16D, 2.4x", nodes=(16, 16), speed=2.4),
        conv("conversation, 8P8D, as the papers", nodes=(8, 8), is_plain=True),
        conv("conversation, 8P8D, 1 M tokens a node", nodes=(8, 8), cache_tokens=1_000_000),
        conv("conversation, 8P8D, 0.5 M tokens a node", nodes=(8, 8), cache_tokens=500_000),
        # past capacity
        conv("past capacity, 8P8D, 2.2x", nodes=(8, 8), speed=2.2),
        conv("past capacity, 2P2D, 0.5x", nodes=(2, 2), speed=0.5),
        conv("past capacity, 8P8D, 2.2x, as the papers", nodes=(8, 8), speed=2.2, is_plain=True),
        # links
        conv("links of 10 Gbit/s, 8P8D, 0.5x", nodes=(8, 8), speed=0.5, link_bytes_per_s=10 * GBIT),
        conv("links of 40 Gbit/s, 8P8D", nodes=(8, 8), link_bytes_per_s=40 * GBIT),
        # slow nodes
        conv("half of the nodes 3 times slower, 8P8D, 0.8x", nodes=(8, 8), speed=0.8, slow=3.0),
        conv("half of the nodes 3 times slower, 8P8D", nodes=(8, 8), slow=3.0),
        conv("half of the nodes twice slower, 8P8D, 0.9x", nodes=(8, 8), speed=0.9, slow=2.0),
        Regime("half 3 times slower, tools", _generated("toolagent", 3.9), (4, 4), slow=3.0),
        agent("half twice slower, agents", make=_agents(0.9, True), nodes=(4, 4), slow=2.0),
        # what the conductor sees
        conv("KV events 20 s late, 8P8D, 1.2x", nodes=(8, 8), speed=1.2, view_delay_s=20.0),
        conv("predicted twice too slow, 8P8D, 1.2x", nodes=(8, 8), speed=1.2, believed=2.0),
        conv("predicted twice too fast, 8P8D, 1.2x", nodes=(8, 8), speed=1.2, believed=0.5),
        agent("KV events 5 s late, agents", make=_agents(1.3, True), nodes=(4, 4), view_delay_s=5.0),
    ]
    return [*rows, *_agentic(agent), *_generated_rows(), *_rejecting(talk)]


def _agentic(agent: Callable[..., Regime]) -> list[Regime]:
    return [
        agent("agents, closed loop, 4P4D", make=_agents(1.6, True), nodes=(4, 4)),
        agent(
            "agents, closed loop, 4P4D, caches doubled",
            make=_agents(1.8, True),
            nodes=(4, 4),
            cache_tokens=2_000_000,
        ),
        agent(
            "agents, closed loop, 4P4D, caches halved",
            make=_agents(0.7, True),
            nodes=(4, 4),
            cache_tokens=500_000,
        ),
        agent("agents, closed loop, 8P8D", make=_agents(3.4, True), nodes=(8, 8)),
        agent("agents, open loop, 3P3D", make=_agents(0.8, False), nodes=(3, 3)),
        agent("agents, open loop, 4P4D", make=_agents(1.15, False), nodes=(4, 4)),
        agent(
            "agents, long contexts, 6P4D",
            make=_agents(0.5, True, first_tokens=24_000, turn_tokens=2_500),
            nodes=(6, 4),
            slo=Slo(4.0, 0.04),
        ),
        agent("agents, long pauses, 4P4D", make=_agents(1.3, True, think_s=40.0), nodes=(4, 4)),
        agent("agents, quick tools, 4P4D", make=_agents(1.2, True, think_s=2.0, turns=20.0), nodes=(4, 4)),
        agent(
            "agents, links of 10 Gbit/s, 4P4D",
            make=_agents(0.03, True),
            nodes=(4, 4),
            link_bytes_per_s=10 * GBIT,
        ),
        Regime("agents, 70B, 8P8D", _agents(0.32, True), (8, 8), slo=Slo(10.0, 0.1), cache_tokens=1_000_000),
    ]


def _generated_rows() -> list[Regime]:
    chat, heavy = MixKind(200, 100, 1.0), MixKind(1_500, 250, 1.0, 1.6, most_output_tokens=8_000)
    documents = MixKind(400, 120, shared_share=0.9, num_shared=60, shared_tokens=16_384)
    return [
        Regime("tools, 4P4D", _generated("toolagent", 3.9), (4, 4)),
        Regime(
            "tools, 4P4D, 0.5 M tokens a node", _generated("toolagent", 3.9), (4, 4), cache_tokens=500_000
        ),
        Regime("tools, 4P4D, bursts", _generated("toolagent", 3.4, 0.15), (4, 4)),
        Regime(
            "batch, 8P8D, 1 M tokens a node", _generated("synthetic", 4.6), (8, 8), cache_tokens=1_000_000
        ),
        Regime(
            "batch, 8P8D, 0.5 M tokens a node", _generated("synthetic", 4.2), (8, 8), cache_tokens=500_000
        ),
        Regime("batch, 8P8D, bursts", _generated("synthetic", 4.0, 0.15), (8, 8)),
        Regime("short prompts, 2P3D", _mix(chat, 530.0, times=4), (2, 3), H200, QUICK),
        Regime(
            "short prompts, 2P3D, bursts",
            _mix(dataclasses.replace(chat, burstiness=0.1), 500.0, times=4),
            (2, 3),
            H200,
            QUICK,
        ),
        Regime("heavy tails of output, 2P6D", _mix(heavy, 28.0), (2, 6), H200, ANSWERS),
        Regime(
            "documents that many ask about, 4P4D",
            _mix(documents, 30.0),
            (4, 4),
            H200,
            ANSWERS,
            cache_tokens=300_000,
        ),
        Regime(
            "documents, half twice slower, 4P4D",
            _mix(documents, 15.0),
            (4, 4),
            H200,
            ANSWERS,
            cache_tokens=300_000,
            slow=2.0,
        ),
    ]


def _rejecting(talk: MakeTrace) -> list[Regime]:
    row = partial(Regime, reject=RejectPolicy.PREDICT, rivals=("late", "early", "dynamo", "llm-d"))
    return [
        row(
            "rejecting, conversation, 12P1D, 1.5x, 45 ms",
            make=talk,
            nodes=(12, 1),
            speed=1.5,
            slo=Slo(30.0, 0.045),
        ),
        row(
            "rejecting, conversation, 10P2D, 2x, 55 ms",
            make=talk,
            nodes=(10, 2),
            speed=2.0,
            slo=Slo(30.0, 0.055),
        ),
        row(
            "rejecting, conversation, 8P2D, 1.5x, 40 ms",
            make=talk,
            nodes=(8, 2),
            speed=1.5,
            slo=Slo(30.0, 0.04),
        ),
        row(
            "rejecting, conversation, 6P1D, 8B, 4x, 10 ms",
            make=talk,
            nodes=(6, 1),
            profile=H200,
            speed=4.0,
            slo=Slo(5.0, 0.010),
        ),
        row(
            "rejecting, tools, 5P1D, 8B, 10 ms",
            make=_generated("toolagent", 12.0),
            nodes=(5, 1),
            profile=H200,
            slo=Slo(5.0, 0.010),
        ),
        row(
            "rejecting, heavy tails, 3P1D, 8B, 15 ms",
            make=_mix(MixKind(1_500, 250, 1.0, 1.6, most_output_tokens=8_000), 9.0),
            nodes=(3, 1),
            profile=H200,
            slo=Slo(2.0, 0.015),
        ),
        row("rejecting, past capacity, 8P8D, 2.5x", make=talk, nodes=(8, 8), speed=2.5),
        row("rejecting, agents, 4P4D", make=_agents(1.5, True), nodes=(4, 4), profile=H200, slo=AGENTS),
    ]
