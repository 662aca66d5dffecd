"""`conductor profile --from-log DECISIONS.jsonl`: a profile fitted to what a cluster did under its own load.

A decision log has, for each request that was served, the tokens that were computed and the
seconds that took, and its mean time between tokens. How many sequences decoded beside it, and
with how much context, follows from when they all began and ended. The terms are those of
`profile_fit.py`; what a log does not show (bytes of KV, capacities, the rate of links) stays as
in the profile that the conductor had.

What is seen after the prefill, which is hand-off and messages, becomes the fixed part of a transfer:
a transfer shows one layer of it, so its fixed seconds are as many times longer.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from statistics import median

from base.errors import ConfigError
from bench.profile_fit import Measured, fitted
from conductor.placing.profile import Evidence, Profile
from conductor.replay.conformance import LiveRequest, LiveRun

FEWEST = 20
"""Requests, or a fit says more of its noise than of the nodes."""


def profile_from_run(run: LiveRun, name: str) -> Profile:
    """Return the conductor's own profile with prefill, decode and hand-off as they were measured.

    Raises:
        ConfigError: too few requests were served.
    """
    prefill = prefill_points(run.served)
    decode = decode_points(run.served)
    if min(len(prefill), len(decode)) < FEWEST:
        raise ConfigError(f"{len(prefill)} prefills and {len(decode)} answers: a fit takes {FEWEST} of each")
    known = run.shared.profile
    make = partial(
        dataclasses.replace,
        known,
        name=name,
        source="fitted to a decision log; links and capacities are as they were given to the conductor",
        transfer_fixed_s=known.num_layers * max(0.0, median(map(_after_prefill_s, run.served))),
        dispatch_s=0.0,
        dispatch_token_s=0.0,
        # one line for all: what a prompt took does not say which kernel attended
        long_chunk_tokens=0,
        fitted_tokens=0,
    )
    return fitted(make, prefill, decode, Evidence(device="see the cluster's own"))


def prefill_points(served: Sequence[LiveRequest]) -> list[Measured]:
    """Return each prefill: tokens computed, tokens of prefix, seconds."""
    return [
        Measured(
            request.made.asked.num_tokens - request.cached_tokens,
            request.cached_tokens,
            request.actual.compute_s,
        )
        for request in served
        if request.actual.compute_s
    ]


def decode_points(served: Sequence[LiveRequest]) -> list[Measured]:
    """Return each answer: mean sequences beside it and itself, their mean context, seconds a token."""
    by_node: dict[str, list[LiveRequest]] = defaultdict(list)
    for request in served:
        by_node[request.placed.decode_node].append(request)
    points = []
    for requests in by_node.values():
        spans = [_span(request) for request in requests]
        for request, (began_s, ended_s) in zip(requests, spans, strict=True):
            if not request.actual.mean_tbt_s or ended_s <= began_s:
                continue
            batch = context = 0.0
            for other, (other_began_s, other_ended_s) in zip(requests, spans, strict=True):
                together_s = min(ended_s, other_ended_s) - max(began_s, other_began_s)
                if together_s > 0:
                    share = together_s / (ended_s - began_s)
                    batch += share
                    context += share * (other.made.asked.num_tokens + other.actual.num_output_tokens / 2)
            points.append(Measured(batch, context / batch, request.actual.mean_tbt_s))
    return points


def _span(request: LiveRequest) -> tuple[float, float]:
    """Return when a request's decoding began and ended."""
    began_s = request.made.arrived_at_s + (request.actual.ttft_s or 0.0)
    steps = max(0, request.actual.num_output_tokens - 1)
    return began_s, began_s + steps * (request.actual.mean_tbt_s or 0.0)


def _after_prefill_s(request: LiveRequest) -> float:
    actual = request.actual
    waited_s = request.made.decided_at_s - request.made.arrived_at_s
    return (actual.ttft_s or 0.0) - waited_s - (actual.queue_s or 0.0) - (actual.compute_s or 0.0)
