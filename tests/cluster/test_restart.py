"""A process that dies is started again, registers again, and serves again."""

import os
import signal

from tests.cluster.asking import generated, until

PROMPT = list(range(100, 180))


def epochs(cluster):
    return {node["id"]: node["epoch"] for node in cluster.status()["nodes"]}


def test_killed_nodes_come_back_with_new_epochs_and_give_the_same_tokens(cluster):
    expected, _ = generated(cluster.grpc_address, PROMPT, 8)
    before = epochs(cluster)
    for name in before:
        os.kill(cluster.processes[name].pid(), signal.SIGKILL)
    until(
        lambda: (
            epochs(cluster).keys() == before.keys()
            and all(epoch != before[name] for name, epoch in epochs(cluster).items())
        )
    )
    tokens, usage = generated(cluster.grpc_address, PROMPT, 8)
    assert tokens == expected
    assert usage.cached_tokens == 0, "a dead node's blocks are still believed in"
