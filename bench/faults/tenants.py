"""Can a tenant learn by the time to its first token what another tenant has asked?

For each prompt: tenant A asks it, so that it is cached. Then tenant B asks the same prompt and a
fresh one of the same length, in random order, and A asks it once more. B's two samples are
compared by the two-sample Kolmogorov-Smirnov test; so are A's second and B's fresh ones, to
show that the comparison would see a hit.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from base.config import ServerConfig
from bench.faults.asking import SMALL_MODEL, Prompt, drawn_prompts
from bench.faults.cluster import fault_cluster
from bench.faults.samples import ks_p_value
from bench.faults.small_model import small_model
from conductor.api.keys import KeyFile, Quota, change_keys, made_key

PROMPT_TOKENS = 800


def tenants_timing(count: int) -> dict[str, Any]:
    """Return the row."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        keys = {tenant: made_key(tenant, tenant, operator=tenant == "operator") for tenant in _TENANTS}
        records = tuple(record for record, _ in keys.values())
        change_keys(folder / "keys.json", lambda: KeyFile({tenant: Quota() for tenant in keys}, records))
        os.environ["CONDUCTOR_API_KEY"] = keys["operator"][1]
        server = ServerConfig(http_port=0, grpc_port=0, keys_file=str(folder / "keys.json"))
        with fault_cluster(small_model(folder / "model"), folder / "run", 1, 1, server=server) as cluster:
            return _compared(
                cluster.http_port, {tenant: secret for tenant, (_, secret) in keys.items()}, count
            )


_TENANTS = ("a", "b", "operator")


def _compared(port: int, keys: dict[str, str], count: int) -> dict[str, Any]:
    rng = random.Random(count)
    ttft_s: dict[str, list[float]] = {"b_same": [], "b_fresh": [], "a_again": []}
    # The first prompts of a process find code and memory cold.
    for prompt in drawn_prompts(rng, 6, (PROMPT_TOKENS, PROMPT_TOKENS), 1):
        _first_token_s(port, keys["a"], prompt)
    for _ in range(count):
        same, fresh = (drawn_prompts(rng, 1, (PROMPT_TOKENS, PROMPT_TOKENS), 1)[0] for _ in ("same", "fresh"))
        _first_token_s(port, keys["a"], same)
        asked = [("b_same", "b", same), ("b_fresh", "b", fresh), ("a_again", "a", same)]
        rng.shuffle(asked)
        for sample, tenant, prompt in asked:
            ttft_s[sample].append(_first_token_s(port, keys[tenant], prompt))
    return {
        "n": count,
        "prompt_tokens": PROMPT_TOKENS,
        "ttft_ms_median": {name: round(statistics.median(took) * 1e3, 2) for name, took in ttft_s.items()},
        "ks_p_same_against_fresh": ks_p_value(ttft_s["b_same"], ttft_s["b_fresh"]),
        "ks_p_own_hit_against_fresh": ks_p_value(ttft_s["a_again"], ttft_s["b_fresh"]),
    }


def _first_token_s(port: int, key: str, prompt: Prompt) -> float:
    body = {
        "model": SMALL_MODEL,
        "prompt": prompt.token_ids,
        "max_tokens": 1,
        "ignore_eos": True,
        "stream": True,
        "seed": 1,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        begin_s = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Authorization": f"Bearer {key}"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(response.read().decode())
        response.readline()
        took_s = time.perf_counter() - begin_s
        response.read()
        return took_s
    finally:
        connection.close()
