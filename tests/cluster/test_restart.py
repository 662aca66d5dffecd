"""A process that dies is started again, registers again, and serves again."""

import os
import signal

import pytest

from tests.cluster.asking import generated, until
from tests.cluster.conftest import BLOCK_SIZE

PROMPT = list(range(100, 180))
LONG_PROMPT = list(range(300, 900))


def epochs(cluster):
    return {node["id"]: node["epoch"] for node in cluster.status()["nodes"]}


def are_back(now, before):
    """Return whether all nodes are attached again. One look: between two of them they may leave."""
    return now.keys() == before.keys() and all(epoch != before[name] for name, epoch in now.items())


@pytest.mark.full
def test_a_prefill_node_that_starts_cold_loads_what_the_decode_node_holds(cluster):
    expected, _ = generated(cluster.grpc_address, LONG_PROMPT, 8)
    before = epochs(cluster)
    os.kill(cluster.processes["prefill-0"].pid(), signal.SIGKILL)
    until(lambda: epochs(cluster).get("prefill-0", before["prefill-0"]) != before["prefill-0"])
    tokens, usage = generated(cluster.grpc_address, LONG_PROMPT, 8)
    assert tokens == expected
    assert usage.cached_tokens == (len(LONG_PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_killed_nodes_come_back_with_new_epochs_and_give_the_same_tokens(cluster):
    expected, _ = generated(cluster.grpc_address, PROMPT, 8)
    before = epochs(cluster)
    for name in before:
        os.kill(cluster.processes[name].pid(), signal.SIGKILL)
    until(lambda: are_back(epochs(cluster), before))
    tokens, usage = generated(cluster.grpc_address, PROMPT, 8)
    assert tokens == expected
    assert usage.cached_tokens == 0, "a dead node's blocks are still believed in"
