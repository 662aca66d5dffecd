"""Chunked pipeline prefill: several nodes that prefill one prompt together.

Each node of a group holds an equal share of the layers. A prompt is cut into chunks, and a
chunk passes from node to node while the next one follows it: the first prompt of an idle
group ends after

    end[stage, chunk] = max(end[stage - 1, chunk] + hop, end[stage, chunk - 1]) + seconds / stages

and the next prompt may enter as soon as the first stage is free. To the scheduler a group
is one node, so many times as fast: what fills and empties the pipeline is not predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from conductor.placing.profile import Profile

CHUNK_TOKENS = 4_096
"""Half of `prefill_small_s` is lost on chunks this small at the paper's cluster; smaller ones lose more."""

HOP_S = 0.001
"""The activations of a chunk, to the next node: 64 MiB at 87 GB/s and a message."""


def grouped(profile: Profile, stages: int) -> Profile:
    """Return the profile of `stages` nodes that prefill as one."""
    return replace(
        profile,
        name=f"{profile.name} x{stages}",
        prefill_fixed_s=profile.prefill_fixed_s / stages,
        prefill_token_s=profile.prefill_token_s / stages,
        prefill_token2_s=profile.prefill_token2_s / stages,
        chunk_token2_s=profile.chunk_token2_s / stages,
        prefill_small_s=profile.prefill_small_s / stages,
        prefix_token_s=profile.prefix_token_s / stages,
        transfer_bytes_per_s=profile.transfer_bytes_per_s * stages,
        host_kv_tokens=profile.host_kv_tokens * stages,
        disk_kv_tokens=profile.disk_kv_tokens * stages,
        disk_bytes_per_s=profile.disk_bytes_per_s * stages,
    )


def run_through(free_at_s: list[float], now_s: float, chunks_s: Sequence[float]) -> tuple[float, float]:
    """Send a prompt through the stages; return when the first is free again and when the last is done.

    Args:
        free_at_s: When each stage is free; brought up to date.
        now_s: When the first chunk may enter.
        chunks_s: Seconds of each chunk on one node that holds all layers.
    """
    stages = len(free_at_s)
    done_s = now_s
    for seconds in chunks_s:
        done_s = now_s - HOP_S
        for stage, free_s in enumerate(free_at_s):
            done_s = free_at_s[stage] = max(done_s + HOP_S, free_s) + seconds / stages
    return free_at_s[0], done_s
