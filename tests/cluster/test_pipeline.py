"""Nodes of several ranks: each rank sends or receives what it has of the KV."""

import json
import os
import signal
from pathlib import Path

import grpc
import pytest

from base.config import SchedulerConfig, StoreConfig
from protos.inference_pb2_grpc import InferenceStub
from tests.cluster.asking import EOS, PATIENCE_S, generate_request, generated, held_blocks, until
from tests.cluster.conftest import BLOCK_SIZE, running
from tests.cluster.test_restart import epochs
from tests.cluster.test_same_tokens import check_all, token_prompts
from tests.cluster.test_store import metric
from tests.engine.builders import reference
from tests.engine.test_smollm2 import fast_prompts

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SMALL_CACHE_GIB = 0.25
GROUPS = {
    "two stages": {"pipeline_parallel": 2},
    "three uneven stages": {"pipeline_parallel": 3, "stage_layers": (12, 11, 7), "chunk_tokens": 33},
    "three ranks that share the heads": {"tensor_parallel": 3},
    "two stages of three ranks": {"pipeline_parallel": 2, "tensor_parallel": 3},
}
TO_GROUPS = {
    "two stages to three ranks": {"pipeline_parallel": 2, "of_decode": {"tensor_parallel": 3}},
    "one rank to two stages": {"of_decode": {"pipeline_parallel": 2}},
}


@pytest.mark.parametrize("group", GROUPS)
def test_groups_of_ranks_say_what_generate_says(group, smollm2, tmp_path, model, tokenizer):
    with running(smollm2, tmp_path, kv_cache_gib=SMALL_CACHE_GIB, **GROUPS[group]) as cluster:
        check_all(cluster, model, token_prompts(tokenizer, fast_prompts()))
        until(lambda: held_blocks(cluster) == 0)


@pytest.mark.parametrize("group", TO_GROUPS)
def test_decode_nodes_of_several_ranks_say_what_generate_says(group, smollm2, tmp_path, model, tokenizer):
    """A few tokens: each is a hundred sums over gloo, which a machine of two cores takes a second for."""
    prompts = [prompt[:150] for prompt in token_prompts(tokenizer, fast_prompts()[:2])]
    with running(smollm2, tmp_path, kv_cache_gib=SMALL_CACHE_GIB, **TO_GROUPS[group]) as cluster:
        for prompt in (*prompts, prompts[0]):
            tokens, _ = generated(cluster.grpc_address, prompt, 5)
            expected = reference(model, prompt, 5, EOS)
            assert tokens == [token for token in expected if token != EOS]
        until(lambda: held_blocks(cluster) == 0)


def other_ranks(cluster, name):
    """Return the processes that a node started."""
    tasks = Path(f"/proc/{cluster.processes[name].pid()}/task").iterdir()
    return sorted(int(pid) for task in tasks for pid in (task / "children").read_text().split())


def is_there(pid):
    """Whether a process runs; one that ended and nobody asked for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_stage_killed_mid_prompt_delays_the_answer_alone(smollm2, tmp_path):
    prompt = [17 + (7 * index) % 20_000 for index in range(900)]
    # It is the only node that prefills, and starts anew, three processes, in many seconds.
    patient = SchedulerConfig(role_wait_s=240, patience_s=240, roles="fixed")
    fields = {"kv_cache_gib": SMALL_CACHE_GIB, "scheduler": patient, "pipeline_parallel": 3}
    with running(smollm2, tmp_path, **fields) as cluster:
        expected, _ = generated(cluster.grpc_address, [token + 1 for token in prompt], 8)
        before = other_ranks(cluster, "prefill-0")
        assert len(before) == 2
        with grpc.insecure_channel(cluster.grpc_address) as channel:
            call = InferenceStub(channel).Generate(generate_request(prompt, 8), timeout=PATIENCE_S)
            until(lambda: held_blocks(cluster) > 20)
            os.kill(before[0], signal.SIGKILL)
            tokens = [token for response in call for token in response.token_ids]
        assert len([token for token in tokens if token != EOS]) <= 8
        until(lambda: not any(map(is_there, before)))
        assert set(other_ranks(cluster, "prefill-0")).isdisjoint(before)
        assert generated(cluster.grpc_address, [token + 1 for token in prompt], 8)[0] == expected
        assert generated(cluster.grpc_address, prompt, 8)[0] == [token for token in tokens if token != EOS]
        until(lambda: held_blocks(cluster) == 0)


def test_a_node_of_which_a_rank_stands_still_while_idle_starts_again_and_others_serve_on(smollm2, tmp_path):
    patient = SchedulerConfig(role_wait_s=240, patience_s=240, roles="fixed")
    fields = {"kv_cache_gib": SMALL_CACHE_GIB, "scheduler": patient, "pipeline_parallel": 2}
    with running(smollm2, tmp_path, of_decode={"pipeline_parallel": 2}, **fields) as cluster:
        expected, _ = generated(cluster.grpc_address, [3, 4, 5], 4)
        until(lambda: held_blocks(cluster) == 0)
        before = epochs(cluster)
        (stopped,) = other_ranks(cluster, "prefill-0")
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: epochs(cluster).get("prefill-0", before["prefill-0"]) != before["prefill-0"])
        assert not is_there(stopped)
        assert generated(cluster.grpc_address, [3, 4, 5], 4)[0] == expected
        assert epochs(cluster)["decode-0"] == before["decode-0"]


def test_a_group_that_loses_a_rank_and_starts_cold_has_its_prefix_from_another_group(smollm2, tmp_path):
    """By way of their stores: what the decode node's ranks hold is lent, and each rank loads its part."""
    prompt = [31 + (13 * index) % 20_000 for index in range(500)]
    fields = {
        "kv_cache_gib": SMALL_CACHE_GIB,
        "scheduler": SchedulerConfig(role_wait_s=240, patience_s=240, roles="fixed"),
        "store": StoreConfig(dram_gib=0.3, disk_path=str(tmp_path / "disk"), disk_gib=1.0),
        "pipeline_parallel": 2,
        "of_decode": {"tensor_parallel": 3},
    }
    with running(smollm2, tmp_path, **fields) as cluster:
        before = epochs(cluster)
        expected, usage = generated(cluster.grpc_address, prompt, 6)
        assert usage.cached_tokens == 0
        # While it saves, or soon after: whatever of it is on disk is whole.
        os.kill(other_ranks(cluster, "prefill-0")[0], signal.SIGKILL)
        until(lambda: epochs(cluster).get("prefill-0", before["prefill-0"]) != before["prefill-0"])
        tokens, usage = generated(cluster.grpc_address, prompt, 6)
        assert (tokens, usage.cached_tokens) == (expected, (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE)
        until(lambda: held_blocks(cluster) == 0)
        for name in before:
            assert metric(cluster, name, 'kvstore_unaccounted_blocks{tier="host"}') == 0


def test_a_client_that_leaves_mid_prompt_leaves_nothing_held_and_a_timeline_tells_of_it(smollm2, tmp_path):
    fields = {"kv_cache_gib": SMALL_CACHE_GIB, "pipeline_parallel": 2, "trace_out": str(tmp_path / "traces")}
    with running(smollm2, tmp_path, **fields) as cluster:
        for _ in range(3):
            with grpc.insecure_channel(cluster.grpc_address) as channel:
                call = InferenceStub(channel).Generate(
                    generate_request([5 + index for index in range(900)], 8), timeout=PATIENCE_S
                )
                until(lambda: held_blocks(cluster) > 20)
                call.cancel()
            until(lambda: held_blocks(cluster) == 0)
        tokens, _ = generated(cluster.grpc_address, [3, 4, 5], 4)
        assert len(tokens) == 4
    events = json.loads((tmp_path / "traces" / "prefill-0.json").read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    used = {tracks[event["tid"]] for event in events if event["ph"] == "X"}
    assert {"stage 0", "stage 1", "transfer of layer 0 on, head 0 on"} <= used
    steps = {
        stage: [event["name"] for event in events if event["ph"] == "X" and tracks[event["tid"]] == stage]
        for stage in ("stage 0", "stage 1")
    }
    assert len(steps["stage 1"]) >= 4
    assert steps["stage 0"][: len(steps["stage 1"])] == steps["stage 1"]
