"""Clients that leave at a random moment of their request: when is the last block free again?"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import time
from typing import Any

import grpc

from bench.faults.asking import SMALL_MODEL, TIMEOUT_S, Prompt, ask, drawn_prompts
from bench.faults.cluster import FaultCluster, wait_until
from bench.faults.kills import LEASE_S, with_cluster
from protos.inference_pb2_grpc import InferenceStub

BOUND_S = 1.0
TOKENS_OF_PROMPT = (500, 1_500)
TOKENS_OF_ANSWER = 150


def _clients_leave(cluster: FaultCluster, count: int) -> dict[str, Any]:
    rng = random.Random(count)
    free_after_s, late, leaked = [], 0, 0
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        stub = InferenceStub(channel)
        usual_s = _usual_s(stub, rng)
        for number in range(count):
            (prompt,) = drawn_prompts(rng, 1, TOKENS_OF_PROMPT, TOKENS_OF_ANSWER)
            stay_s = rng.uniform(0, usual_s)
            if number % 2:
                _leave_http(cluster.http_port, prompt, stay_s, streams=number % 4 == 1)
            else:
                call = stub.Generate(prompt.request(), timeout=TIMEOUT_S)
                time.sleep(stay_s)
                call.cancel()
            try:
                free_after_s.append(wait_until(lambda: _is_idle(cluster), LEASE_S))
                late += free_after_s[-1] > BOUND_S
            except TimeoutError:
                leaked += cluster.held_blocks()
    return {
        "injected": count,
        "usual_s_of_a_request": round(usual_s, 3),
        "all_free_s_median": round(statistics.median(free_after_s), 3),
        "all_free_s_max": round(max(free_after_s), 3),
        "later_than_1_s": late,
        "leaked_blocks": leaked,
    }


def _usual_s(stub: InferenceStub, rng: random.Random) -> float:
    """Return how long a request takes whose client stays."""
    begin_s = time.monotonic()
    for prompt in drawn_prompts(rng, 5, TOKENS_OF_PROMPT, TOKENS_OF_ANSWER):
        ask(stub, prompt.request())
    return (time.monotonic() - begin_s) / 5


def _is_idle(cluster: FaultCluster) -> bool:
    status = cluster.status()
    return not status["running_requests"] and not any(node["held_blocks"] for node in status["nodes"])


def _leave_http(port: int, prompt: Prompt, stay_s: float, streams: bool) -> None:
    body = {
        "model": SMALL_MODEL,
        "prompt": prompt.token_ids,
        "max_tokens": prompt.max_tokens,
        "ignore_eos": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": streams}))
    time.sleep(stay_s)
    connection.close()


clients_leave = with_cluster(_clients_leave)
