"""Two conductors and the same nodes, as processes: each serves, and one that dies takes nothing along."""

import os
import signal

import grpc
import pytest

from protos.inference_pb2_grpc import InferenceStub
from tests.cluster.asking import EOS, PATIENCE_S, generate_request, generated, held_blocks, until
from tests.cluster.conftest import running

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

PROMPT = [17 + (7 * index) % 20_000 for index in range(300)]
NAMES = ("conductor", "conductor-1")
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def pair(smollm2, tmp_path_factory):
    with running(smollm2, tmp_path_factory.mktemp("pair"), conductors=2) as cluster:
        for name in NAMES:
            until(lambda name=name: cluster.status(name)["ready"])
        yield cluster


def streams(cluster, name, prompt):
    """Return an open answer of one conductor, its first token read."""
    channel = grpc.insecure_channel(cluster.grpc_address_of(name))
    call = InferenceStub(channel).Generate(generate_request(prompt, MAX_TOKENS), timeout=PATIENCE_S * 5)
    return channel, call, list(next(call).token_ids)


def in_control(cluster):
    return [name for name in NAMES if cluster.status(name)["in_control"]]


def test_each_conductor_serves_and_places_by_what_the_other_had_computed(pair):
    tokens, usage = generated(pair.grpc_address_of(NAMES[0]), PROMPT, MAX_TOKENS)
    assert usage.cached_tokens == 0
    until(lambda: held_blocks(pair) == 0)
    again, usage = generated(pair.grpc_address_of(NAMES[1]), PROMPT, MAX_TOKENS)
    assert again == tokens
    assert usage.cached_tokens > 0, "the second conductor did not know of the first one's blocks"


def test_one_of_them_is_in_control_of_the_nodes(pair):
    until(lambda: len(in_control(pair)) == 1)
    assert len(in_control(pair)) == 1, "it was so for a moment only"


def test_a_conductor_that_is_killed_ends_its_own_requests_and_no_others(pair):
    fresh = [token + 1 for token in PROMPT]
    expected, _ = generated(pair.grpc_address_of(NAMES[1]), fresh, MAX_TOKENS)
    doomed_channel, doomed, _ = streams(pair, NAMES[0], [token + 2 for token in PROMPT])
    channel, call, tokens = streams(pair, NAMES[1], fresh)
    with doomed_channel, channel:
        os.kill(pair.processes[NAMES[0]].pid(), signal.SIGKILL)
        with pytest.raises(grpc.RpcError):
            list(doomed)
        tokens += [token for response in call for token in response.token_ids]
    assert [token for token in tokens if token != EOS] == expected
    # nothing that the dead one asked for is held, and the other is in control
    until(lambda: sum(node["held_blocks"] for node in pair.status(NAMES[1])["nodes"]) == 0)
    assert generated(pair.grpc_address_of(NAMES[1]), PROMPT, MAX_TOKENS)[0]
    # it is started again, and the nodes find it
    until(lambda: NAMES[0] in serving(pair))
    until(lambda: len(in_control(pair)) == 1)


def serving(cluster):
    found = []
    for name in NAMES:
        try:
            if cluster.status(name)["ready"]:
                found.append(name)
        except OSError:
            pass
    return found
