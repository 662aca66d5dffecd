"""The cluster that a replay simulates, as it is asked for. Values only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from base.config import EngineConfig
from base.errors import ConfigError
from base.request import NodeId, Role, Slo
from conductor.placing.placement import UNBOUNDED
from conductor.placing.prefill_policies import PrefillPolicy
from conductor.placing.profile import Profile, slowed
from conductor.placing.retries import MAX_ATTEMPTS
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from conductor.replay.faults import NodeFault
from conductor.replay.pipeline import grouped
from conductor.replay.segments import Segment

PLAIN = SchedulerSettings(reject=RejectPolicy.NONE, roles_follow=False)
"""The scheduler of the papers: each request is placed as it comes, nobody is refused, and roles are fixed."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node to simulate. Its profile says how fast it is and how much it holds."""

    node_id: NodeId
    roles: frozenset[Role]
    profile: Profile
    chunk_tokens: int
    """Tokens of a step; 0: a step with a prompt is all of it."""
    stages: int = 1
    """Nodes that prefill each prompt together, of which this one stands for all."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The cluster to simulate and how it places."""

    prefill_nodes: int
    decode_nodes: int
    """Number of nodes that decode; 0: every node has both roles, those of `prefill_nodes`."""
    block_size: int
    policy: str = "global"
    """The name of the policy; of those of replay alone, `random` has no settings."""
    rule: PrefillPolicy | None = None
    """The policy itself, where its name is none of `policies.POLICIES`."""
    settings: SchedulerSettings = PLAIN
    learns: bool = False
    """Whether predictions are corrected by what was measured, as the service's are."""
    max_waiting: int = 512
    """Requests that wait to be placed, at most; then one is let go."""
    role_wait_s: float = 10.0
    """Seconds that a request waits for a role that has no node left."""
    max_attempts: int = MAX_ATTEMPTS
    """How often a request is placed, at most, where nodes are lost."""
    is_fair: bool = True
    """Whether those who wait are ordered as the service does; False: as they came."""
    conductors: int = 1
    """Conductors, which take requests in turn and hear of the others' only what nodes report."""
    patience_s: float = inf
    """Seconds that a request without a TTFT bound waits to be placed, unless nobody is refused."""
    retests: bool = True
    """Whether its decode node tests a request again; False: what was admitted decodes."""
    slo: Slo = UNBOUNDED
    """The bounds that each request names, unless nobody is refused."""
    eviction: str = "lru"
    """A policy of `kvstore/eviction.py`."""
    view_delay_s: float = 0.0
    output_limit: int | None = None
    """Cuts every output; 1 is prefill alone."""
    sample_every_s: float = 0.0
    """Record the load of both pools so often; 0: never."""
    faults: tuple[NodeFault, ...] = ()
    seed: int = 0
    stages: int = 1
    """Nodes that prefill each prompt together, in a pipeline of chunks; divides `prefill_nodes`."""
    watched_blocks: tuple[int, ...] = ()
    """Blocks whose replicas are counted with each sample."""
    decode_caches: bool = False
    """Whether a decode node keeps the prompts that it received, and lends them."""
    chunk_tokens: int | None = None
    """Tokens of a step; 0: a step with a prompt is all of it, as in the paper's model and in a pipelined
    group. None: the engine's default where the profile knows what a chunk costs or nodes do both,
    else 0."""
    both_nodes: int = 0
    """Nodes with both roles, beside the others."""
    other_profiles: tuple[tuple[str, Profile], ...] = ()
    """Names of nodes, and the profile of each where it is not that of the others."""
    slow_nodes: tuple[tuple[str, float], ...] = ()
    """Names of nodes, and how many times slower than the profile says each of them computes."""
    believed: Profile | None = None
    """The profile that the conductor predicts with, where that is not the nodes' own."""
    step_budgets: bool = True
    """Whether steps take of prompts what those who decode in them can wait for; False: whole chunks."""
    max_batch: float = inf
    """Sequences in one step of a node, at most."""
    on_gaps: Callable[[Sequence[Segment]], None] | None = None
    """Notified of the gaps between the tokens of each request that completed."""

    @property
    def is_colocated(self) -> bool:
        """Whether every node has both roles."""
        return not self.decode_nodes

    def nodes(self, profile: Profile) -> list[NodeSpec]:
        """Return the nodes, prefill nodes first.

        Raises:
            ConfigError: they cannot be grouped so, or a slow node is none of them.
        """
        specs = {spec.node_id: spec for spec in self._alike(profile)}
        for name, other in self.other_profiles:
            node_id = NodeId(name)
            if node_id not in specs or self.stages > 1:
                raise ConfigError(f"node {name!r} of another profile: there is none of that name")
            if other.kv_token_bytes != profile.kv_token_bytes:
                raise ConfigError(
                    f"node {name!r}: its profile has {other.kv_token_bytes} bytes of KV a token and the "
                    f"others {profile.kv_token_bytes}: nodes of one cluster run one model"
                )
            chunk_tokens = self._chunk_tokens(other, specs[node_id].roles)
            specs[node_id] = replace(specs[node_id], profile=other, chunk_tokens=chunk_tokens)
        for name, factor in self.slow_nodes:
            node_id = NodeId(name)
            if node_id not in specs:
                raise ConfigError(f"slow node {name!r}: there is none of that name")
            specs[node_id] = replace(specs[node_id], profile=slowed(specs[node_id].profile, factor))
        return list(specs.values())

    def node_profile(self, profile: Profile) -> Profile:
        """Return the profile of a prefill node that is as fast as it should be."""
        return self._alike(profile)[0].profile

    def _alike(self, profile: Profile) -> list[NodeSpec]:
        """Return the nodes as they are where none is slow."""
        if self.prefill_nodes % self.stages or (self.is_colocated and self.stages > 1):
            raise ConfigError(
                f"{self.prefill_nodes} prefill nodes in groups of {self.stages}: --stages divides them, "
                "and nodes with both roles are in none"
            )
        prefill, decode = frozenset({Role.PREFILL}), frozenset({Role.DECODE})
        both = prefill | decode
        if self.is_colocated:
            count, chunk_tokens = self.prefill_nodes + self.both_nodes, self._chunk_tokens(profile, both)
            return [NodeSpec(NodeId(f"c{number}"), both, profile, chunk_tokens) for number in range(count)]
        group = grouped(profile, self.stages) if self.stages > 1 else profile
        chunk_tokens = self._chunk_tokens(profile, prefill)
        specs = [
            NodeSpec(NodeId(f"p{number}"), prefill, group, chunk_tokens, self.stages)
            for number in range(self.prefill_nodes // self.stages)
        ]
        specs += [
            NodeSpec(NodeId(f"d{number}"), decode, profile, chunk_tokens)
            for number in range(self.decode_nodes)
        ]
        chunk_tokens = self._chunk_tokens(profile, both)
        return specs + [
            NodeSpec(NodeId(f"c{number}"), both, profile, chunk_tokens) for number in range(self.both_nodes)
        ]

    def _chunk_tokens(self, profile: Profile, roles: frozenset[Role]) -> int:
        """Return the tokens of a step of a node with these roles."""
        if self.stages > 1:
            return 0
        if self.chunk_tokens is not None:
            return self.chunk_tokens
        has_chunks = len(roles) > 1 or profile.chunk_step_s or self.settings.roles_follow
        return default_chunk_tokens(profile) if has_chunks else 0


def default_chunk_tokens(profile: Profile) -> int:
    """Return the tokens of a step where nothing else is said: an engine's on what the profile is of.

    Those that launch ahead are on GPUs, as `conductor profile` writes. One fitted to a paper does not say
    so, and has a CPU's."""
    return EngineConfig().prompt_tokens(on_gpu=profile.launches_ahead)
