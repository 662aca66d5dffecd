"""A profile fitted to the steps that a cluster's nodes took under its own load.

A node's timeline (`trace_out`, `conductor up --trace-out`) has every step with what each request had of
it, and the decision log what each request's prompt was and how much of it was found. Both together say
of each step what `conductor/placing/cost_model.py` asks: rows, what they attended to, sequences, context. A
prompt's seconds would not: prompts share steps, and each is charged all of them.

Of steps that other work on the machine stretches, the fit is to predict the mean, so errors are
relative to what is predicted. Relative to what was measured, the longest would count least.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from base.errors import ConfigError
from base.request import RequestId
from base.step_cost import hit_share
from bench.profile_fit import least_squares
from conductor.placing.profile import Evidence, Profile
from conductor.replay.conformance import LiveRequest, LiveRun

PREFILL_SUFFIX = ".prefill"
"""End of a request's name on the node that only prefills it."""

FEWEST = 20
"""Steps of each kind, or a fit says more of its noise than of the nodes."""

ROUNDS = 4
"""Times that steps are fitted: each takes its weights from the fit before."""

SHORTEST_S = 1e-6


@dataclass(frozen=True, slots=True)
class LiveStep:
    """One step of one node."""

    began_s: float
    """On that node's clock."""
    seconds: float
    chunk_tokens: int
    attended: float
    """See `StepCost.with_chunks_s`."""
    batch: int
    context_tokens: int


def steps_of(run: LiveRun, timeline: Path) -> list[LiveStep]:
    """Return the steps of one node, in order, from its timeline; raises ConfigError: it is none."""
    prompts = {request.made.asked.request_id: request for request in run.served}
    computed: dict[str, int] = {}
    return [
        _step(began_s, seconds, shares, prompts, computed)
        for began_s, seconds, shares in sorted(_spans(timeline), key=lambda span: span[0])
    ]


def _spans(timeline: Path) -> Iterator[tuple[float, float, dict[str, int]]]:
    try:
        events = json.loads(timeline.read_text())["traceEvents"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{timeline}: no timeline: {error}") from None
    for event in events:
        if event["ph"] == "X" and event["name"].startswith("step ") and event["args"]:
            yield event["ts"] / 1e6, event["dur"] / 1e6, event["args"]


def _step(
    began_s: float,
    seconds: float,
    shares: dict[str, int],
    prompts: dict[RequestId, LiveRequest],
    computed: dict[str, int],
) -> LiveStep:
    """Return a step; `computed` has each request's tokens with KV, and is brought up to date."""
    chunk_tokens, attended, batch, context_tokens = 0, 0.0, 0, 0
    for name, tokens in shares.items():
        before = computed.get(name)
        if before is None:
            before = _found(name, prompts)
        if tokens == 1:
            batch += 1
            context_tokens += before
        else:
            chunk_tokens += tokens
            attended += tokens * (tokens + 2 * before)
        computed[name] = before + tokens
    return LiveStep(began_s, seconds, chunk_tokens, attended, batch, context_tokens)


def _found(name: str, prompts: dict[RequestId, LiveRequest]) -> int:
    """Return the tokens of a request whose KV is there when a node begins with it."""
    request = prompts.get(RequestId(name.removesuffix(PREFILL_SUFFIX)))
    if request is None:
        return 0
    stays = request.placed.prefill_node == request.placed.decode_node
    is_prompt = stays or name.endswith(PREFILL_SUFFIX)
    return request.cached_tokens if is_prompt else request.made.asked.num_tokens


def profile_from_steps(
    run: LiveRun, timelines: Path, name: str, is_wanted: Callable[[LiveStep], bool] = lambda step: True
) -> Profile:
    """Return the conductor's own profile with steps, hand-off and KV blocks as they were measured.

    Args:
        timelines: The folder of the nodes' timelines.
        is_wanted: Which steps to fit.

    Raises:
        ConfigError: too few steps were taken.
    """
    files = sorted(timelines.glob("*.json"))
    steps = [step for file in files for step in steps_of(run, file) if is_wanted(step)]
    chunked = [step for step in steps if step.chunk_tokens]
    decoding = [step for step in steps if not step.chunk_tokens]
    if min(len(chunked), len(decoding)) < FEWEST:
        found = f"{len(chunked)} steps with a chunk and {len(decoding)} without"
        raise ConfigError(f"{found}: a fit takes {FEWEST}")
    share = run.shared.profile.expert_share
    decode_s, sequence_s, context_s, experts_s = _fit(
        [[1.0, step.batch, step.context_tokens, hit_share(share, step.batch)] for step in decoding],
        [step.seconds for step in decoding],
    )
    step_s, token_s, token2_s, mixed_s, chunk_sequence_s = _fit(
        [
            [1.0, step.chunk_tokens + step.batch, step.attended, step.batch > 0, step.batch]
            for step in chunked
        ],
        [max(SHORTEST_S, step.seconds - context_s * step.context_tokens) for step in chunked],
    )
    known, smallest_tokens = run.shared.profile, capacity_tokens(run)
    return dataclasses.replace(
        known,
        name=name,
        source="fitted to the steps of a cluster; its links are as they were given to the conductor",
        prefill_fixed_s=step_s,
        prefill_token_s=max(token_s, SHORTEST_S),
        prefill_token2_s=token2_s,
        prefill_small_s=0.0,
        prefix_token_s=0.0,
        decode_fixed_s=max(decode_s, SHORTEST_S),
        decode_sequence_s=sequence_s,
        decode_context_token_s=context_s,
        decode_experts_s=experts_s,
        chunk_step_s=max(step_s, SHORTEST_S),
        mixed_step_s=mixed_s,
        chunk_sequence_s=chunk_sequence_s,
        # one line for all: a node's chunks are mostly of one length
        long_chunk_tokens=0,
        # a hand-off shows one layer of its fixed seconds
        transfer_fixed_s=known.num_layers * max(0.0, fmean(map(_outside_s, run.served))),
        device_kv_tokens=smallest_tokens,
        # what is found again is in the paged cache: a node with a store has more
        host_kv_tokens=smallest_tokens,
        dispatch_s=0.0,
        dispatch_token_s=0.0,
        fitted_tokens=max(each.made.asked.num_tokens + each.actual.num_output_tokens for each in run.served),
        evidence=Evidence(device="see the cluster's own"),
    )


def capacity_tokens(run: LiveRun) -> int:
    """Return the tokens of KV that the smallest node has room for; raises ConfigError as `LiveRun.nodes`."""
    run.nodes()
    return min(node.capacity_tokens for made in run.decisions for node in made.seen.nodes or ())


def _outside_s(request: LiveRequest) -> float:
    """Return the seconds of a TTFT that its prompt neither waited for a step nor was in one."""
    actual = request.actual
    waited_s = request.made.decided_at_s - request.made.arrived_at_s
    return (actual.ttft_s or 0.0) - waited_s - (actual.queue_s or 0.0) - (actual.compute_s or 0.0)


def _fit(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the coefficients, none under 0, of the least error relative to what they predict."""
    matrix, measured = np.array(terms, dtype=np.float64), np.array(seconds)
    weights = measured
    found: tuple[float, ...] = ()
    for _ in range(ROUNDS):
        found = least_squares(matrix / weights[:, None], measured / weights)
        weights = np.maximum(matrix @ np.array(found), SHORTEST_S)
    return found
