"""How the cluster's tests ask and wait."""

from __future__ import annotations

import threading

import grpc

from bench.local_cluster import LocalCluster
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub

EOS = 2
PATIENCE_S = 240.0
"""Seconds for a role to start again, on a machine with other work too; the longest wait of a test here."""


def until(condition, timeout_s=PATIENCE_S):
    """Return when `condition` holds; it is asked a few times a second."""
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.05)):
        if condition():
            return
        pause.wait(0.05)
    raise AssertionError(f"not so within {timeout_s} s")


def generate_request(token_ids, max_tokens, **fields):
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=token_ids),
        sampling=pb.Sampling(temperature=0.0, repetition_penalty=1.0),
        stop=pb.Stop(max_tokens=max_tokens),
        **fields,
    )


def generated(address, token_ids, max_tokens):
    """Return the tokens of a greedy answer, the end of sequence left out, and its usage."""
    tokens, usage = [], None
    with grpc.insecure_channel(address) as channel:
        for response in InferenceStub(channel).Generate(
            generate_request(token_ids, max_tokens), timeout=PATIENCE_S
        ):
            tokens += response.token_ids
            if response.finish_reason:
                usage = response.usage
    return [token for token in tokens if token != EOS], usage


def held_blocks(cluster: LocalCluster):
    return sum(node["held_blocks"] for node in cluster.status()["nodes"])
