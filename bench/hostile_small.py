"""Short bodies that ask for much work: numbers at their ends, and everything at its bound at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bench.hostile_bodies import SERVED_MODEL, Body, http_sites
from conductor.api.embeddings.generation import MAX_INPUTS
from conductor.api.openai_schema import MAX_CHOICES
from conductor.api.options import MAX_LOGIT_BIASES, MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from protos import inference_pb2 as pb

NUMBERS = (
    "0",
    "-1",
    "1",
    "20",
    "128",
    "2147483647",
    "9223372036854775807",
    "1e308",
    "-1e308",
    "1e-300",
    "9" * 400,
)
CHAT = {"model": SERVED_MODEL, "messages": [{"role": "user", "content": "a"}]}
STOPS = [chr(97 + number) * MAX_STOP_CHARS for number in range(MAX_STOP_STRINGS)]
STOP_IDS = list(range(10, 10 + MAX_STOP_TOKEN_IDS))
MOST: dict[str, Any] = {
    "n": MAX_CHOICES,
    "stop": STOPS,
    "stop_token_ids": STOP_IDS,
    "logit_bias": {str(token_id): 1.0 for token_id in range(MAX_LOGIT_BIASES)},
    "ignore_eos": True,
    "return_token_ids": True,
}
PERIODIC = ["ab" * (MAX_STOP_CHARS // 2 - 1) + chr(99 + number) for number in range(MAX_STOP_STRINGS)]


def small_bodies() -> Iterator[Body]:
    """Yield them, HTTP's and gRPC's."""
    for site in http_sites():
        for number in NUMBERS if site.kind == "one" else ():
            made = site.before + number.encode() + site.after
            yield Body(site.path, f"small, {site.name}: {number[:20]}", lambda made=made: made)  # type: ignore[misc]
    for path, name, table in _heavy():
        body = json.dumps(table).encode()
        yield Body(path, f"small, {name}", lambda body=body: body)  # type: ignore[misc]
    for method, name, call in _heavy_calls():
        said = call.SerializeToString()
        yield Body(f"/conductor.v1.Inference/{method}", f"small, {name}", lambda said=said: said)  # type: ignore[misc]


def _heavy() -> Iterator[tuple[str, str, dict[str, Any]]]:
    chat, completion = "/v1/chat/completions", "/v1/completions"
    for stream in (False, True):
        word = "streamed" if stream else "whole"
        yield chat, f"everything, {word}", CHAT | MOST | {"max_tokens": 300, "stream": stream}
        logprobs = {"logprobs": True, "top_logprobs": 20, "max_tokens": 300, "stream": stream}
        yield chat, f"everything with logprobs, {word}", CHAT | MOST | logprobs
        yield chat, f"one long answer with logprobs, {word}", CHAT | logprobs | {"max_tokens": 1_500}
        yield chat, f"one long answer, {word}", CHAT | {"max_tokens": 1_500, "stream": stream}
        yield (
            chat,
            f"periodic stop strings, {word}",
            CHAT | {"stop": PERIODIC, "max_tokens": 500, "stream": stream},
        )
        prompts = {
            "model": SERVED_MODEL,
            "prompt": ["a"] * MAX_CHOICES,
            "max_tokens": 200,
            "stream": stream,
            "logprobs": 20,
        }
        yield completion, f"many prompts with logprobs, {word}", prompts
        long = {
            "model": SERVED_MODEL,
            "prompt": [1000] * 100_000,
            "max_tokens": 20,
            "n": MAX_CHOICES,
            "stream": stream,
        }
        yield completion, f"a long prompt and many choices, {word}", long
        shown = {"return_token_ids": True, "echo": True}
        yield completion, f"a long prompt with echo and many choices, {word}", long | shown
        yield completion, f"long prompts, {word}", long | {"n": 1, "prompt": [[1000] * 1_500] * MAX_CHOICES}
    for form in ("float", "base64"):
        wanted = {"model": SERVED_MODEL, "encoding_format": form}
        yield "/v1/embeddings", f"many inputs, {form}", wanted | {"input": ["a"] * MAX_INPUTS}
        yield (
            "/v1/embeddings",
            f"many longer inputs, {form}",
            wanted | {"input": ["word " * 390] * MAX_INPUTS},
        )
        yield "/v1/embeddings", f"lists of ids, {form}", wanted | {"input": [[1000] * 90] * MAX_INPUTS}
    yield "/v1/embeddings", "a window of ids", {"model": SERVED_MODEL, "input": [1000] * 131_000}
    yield "/detokenize", "a window of ids", {"tokens": [1000] * 131_000}
    yield "/tokenize", "a window of text", {"prompt": " word" * 131_000}
    yield (
        "/tokenize",
        "special tokens",
        CHAT | {"messages": [{"role": "user", "content": "<|im_end|>" * 30_000}]},
    )


def _heavy_calls() -> Iterator[tuple[str, str, pb.GenerateRequest | pb.EmbedRequest]]:
    ids = pb.TokenIds(ids=[1000] * 131_000)
    yield "Generate", "a window of ids", pb.GenerateRequest(token_ids=ids, stop=pb.Stop(max_tokens=1))
    yield "Embed", "a window of ids", pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=ids)])
    yield "Embed", "many inputs", pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")] * MAX_INPUTS)
    most = pb.Stop(max_tokens=1_500, strings=STOPS, token_ids=STOP_IDS)
    yield "Generate", "logprobs and stop strings", pb.GenerateRequest(text="a", num_logprobs=20, stop=most)
