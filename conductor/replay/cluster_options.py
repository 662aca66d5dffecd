"""The cluster that a replay simulates, as it is asked for. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from base.request import Slo
from conductor.placing.roles import RoleSettings
from conductor.placing.scheduler import PrefillPolicy
from conductor.placing.scheduler_settings import RejectPolicy
from conductor.replay.faults import Fault


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The cluster to simulate and how it places."""

    prefill_nodes: int
    decode_nodes: int
    block_size: int
    policy: str = "global"
    rule: PrefillPolicy | None = None
    """The policy itself, where its name is none of `policies.POLICIES`."""
    reject: RejectPolicy = RejectPolicy.NONE
    retests: bool = True
    """Whether its decode node tests a request again; False: what was admitted decodes."""
    slo: Slo = field(default_factory=Slo)
    kvcache_balancing_threshold: float | None = None
    eviction: str = "lru"
    """A policy of `kvstore/eviction.py`."""
    view_delay_s: float = 0.0
    output_limit: int | None = None
    """Cuts every output; 1 is prefill alone."""
    sample_every_s: float = 0.0
    """Record the load of both pools so often; 0: never."""
    faults: tuple[Fault, ...] = ()
    roles: RoleSettings | None = None
    """When nodes may change roles; None: never."""
    seed: int = 0
    stages: int = 1
    """Nodes that prefill each prompt together, in a pipeline of chunks; divides `prefill_nodes`."""
    watched_blocks: tuple[int, ...] = ()
    """Blocks whose replicas are counted with each sample."""
    decode_caches: bool = False
    """Whether a decode node keeps the prompts that it received, and lends them."""
    chunk_tokens: int | None = None
    """Of a step; 0: a step with a prompt is all of it, as in the paper's model and in a pipelined group.
    None: the engine's default where the profile knows what a chunk costs, else 0."""
    keep_gaps: bool = False
    """Whether outcomes have every gap between two tokens."""
