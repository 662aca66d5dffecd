"""The rows of `bench.engine`: what is timed of each model, what it costs at least, and what is asked of it.

The bars are vLLM 0.26.0's figures for the same work on one H200 with random weights (2026-11-21 and 22), or
what a format of few bits must reach. `Work` counts the least bytes and arithmetic of a row, from which the
share of the card that was used is worked out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from bench.engine_work import Prompts, Worker

CONTEXT, STEPS = 1024, 128
"""Tokens that a sequence has before its decode steps are timed, and number of the steps."""

WEIGHT_BYTES = {"none": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 6 / 128}
"""Bytes of a weight; four bits have a scale of four bytes and an offset of two for each 128."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a row is held against; None: nothing."""

    vllm: float | None = None
    must: float | None = None
    aim: float | None = None


@dataclass(frozen=True, slots=True)
class Bars:
    """The bars of one model in one format: decode steps in ms by their batch, prompts by length and count."""

    together: Bar
    """Output tokens per second of many requests at once."""
    decode: dict[int, Bar]
    prefill: dict[tuple[int, int], Bar]


def _level(
    together: float, decode: tuple[float, ...], prefill: tuple[float, ...], share: float = 1.0
) -> Bars:
    """Return bars of `share` of vLLM's speed; decode at batch 1, 8, 64, 256, prompts as `LEVEL_PROMPTS`."""
    return Bars(
        Bar(together, together * share, together * 1.1),
        {
            batch: Bar(value, value / share, value / 1.1)
            for batch, value in zip(LEVEL_BATCHES, decode, strict=True)
        },
        {
            size: Bar(value, value / share, value / 1.1)
            for size, value in zip(LEVEL_PROMPTS, prefill, strict=True)
        },
    )


LEVEL_BATCHES = (1, 8, 64, 256)
LEVEL_PROMPTS = ((4096, 1), (16_384, 1), (8192, 8))
UNKNOWN = Bars(Bar(), dict.fromkeys(LEVEL_BATCHES, Bar()), dict.fromkeys(LEVEL_PROMPTS, Bar()))

BARS = {
    ("8b", "none", "auto"): Bars(
        Bar(6779, 6800, 8000),
        {1: Bar(4.98, 4.5, 4.3), 8: Bar(5.35, 4.9, 4.6), 64: Bar(7.72, 7.0, 6.8), 256: Bar(18.5, 15.7, 14.5)},
        {
            (4096, 1): Bar(104.0, 104.0, 93.6),
            (16_384, 1): Bar(491.0, 491.0, 441.9),
            (32_768, 1): Bar(1206.0, 1206.0, 1085.4),
            (8192, 8): Bar(1722.0, 1722.0, 1549.8),
        },
    ),
    ("8b", "fp8", "auto"): _level(9457, (3.52, 3.91, 6.19, 16.1), (68, 354, 1170)),
    ("8b", "fp8", "fp8"): _level(9903, (3.57, 3.82, 5.84, 14.5), (67, 329, 1140)),
    ("8b", "none", "fp8"): Bars(
        Bar(),
        {1: Bar(), 8: Bar(), 64: Bar(), 256: Bar(None, 12.5, 10.5)},
        dict.fromkeys(LEVEL_PROMPTS, Bar()),
    ),
    ("8b", "int4", "auto"): Bars(
        Bar(),
        {1: Bar(None, 2.2, 1.9), 8: Bar(None, 2.5, 1.9), 64: Bar(), 256: Bar()},
        dict.fromkeys(LEVEL_PROMPTS, Bar()),
    ),
    ("qwen3-30b-a3b", "none", "auto"): _level(5328, (4.21, 22.0, 19.0, 27.0), (71, 392, 1200)),
    ("deepseek-v2-lite", "none", "auto"): _level(8314, (3.49, 4.39, 4.18, 15.2), (88, 222, 783), share=0.9),
    ("0.6b", "none", "auto"): Bars(
        Bar(24_434, 24_500, 30_000),
        {1: Bar(1.64, 1.64, 1.39), 64: Bar(3.77, 3.77, 3.2), 256: Bar(10.4, 10.4, 8.84)},
        {},
    ),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    workload: str
    unit: str
    """"tok/s": more is better; "ms": less is."""
    bar: Bar
    measure: Callable[[Worker], Awaitable[float]]
    """Seconds that the work took."""
    tokens: int
    """Output tokens if the unit is tok/s."""
    flops: float
    bytes_read: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a model of a shape costs each rank that holds it."""

    layer_params: int
    """Weights that every token is multiplied by, without the head."""
    head_params: int
    num_layers: int
    heads_dim: int
    """Numbers of K, or V, that a query of a layer meets in all heads."""
    kv_token_bytes: int
    weight_bytes: float = 2.0
    head_bytes: float = 2.0
    expert_params: int = 0
    """Weights of one expert in all layers."""
    num_experts: int = 0
    num_chosen: int = 0
    """Experts of a token."""

    def flops(self, new_tokens: int, sampled: int, seen: int) -> float:
        """Return the arithmetic of new tokens, of sampled ones' logits, and of `seen` (query, key) pairs."""
        active = self.layer_params + self.num_chosen * self.expert_params
        return (
            2.0 * active * new_tokens
            + 2.0 * self.head_params * sampled
            + 4.0 * self.num_layers * self.heads_dim * seen
        )

    def bytes_read(self, steps: int, step_tokens: int, context_tokens: int) -> float:
        """Return the bytes of the weights, once a step, and of the KV of every token that a query sees.

        Of experts those are read that `step_tokens` tokens hit in the mean, routed evenly."""
        weights = self.weight_bytes * self.layer_params + self.head_bytes * self.head_params
        if self.num_experts:
            missed = (1 - self.num_chosen / self.num_experts) ** step_tokens
            weights += self.weight_bytes * self.expert_params * self.num_experts * (1 - missed)
        return weights * steps + float(self.kv_token_bytes) * context_tokens


def work_of(
    shape: PreTrainedConfig, num_ranks: int, quantization: str = "none", kv_dtype: str = "auto"
) -> Work:
    """Return what a model costs each of its ranks, its weights and its KV in these formats."""
    config: Any = shape
    layers, hidden = config.num_hidden_layers, config.hidden_size
    attention, heads_dim, kv_numbers = _attention(config)
    num_experts = getattr(config, "num_experts", 0) or getattr(config, "n_routed_experts", 0) or 0
    dense_layers = (getattr(config, "first_k_dense_replace", 0) or 0) if num_experts else layers
    expert = 3 * hidden * (config.moe_intermediate_size if num_experts else 0)
    shared = expert * (getattr(config, "n_shared_experts", 0) or 0) + hidden * num_experts
    params = layers * attention + dense_layers * 3 * hidden * config.intermediate_size
    params += (layers - dense_layers) * shared
    kv_bytes = kv_numbers * (1 if kv_dtype == "fp8" else 2)
    return Work(
        params // num_ranks,
        config.vocab_size * hidden,
        layers,
        heads_dim // num_ranks,
        layers * kv_bytes // (1 if hasattr(config, "kv_lora_rank") else num_ranks),
        WEIGHT_BYTES[quantization],
        WEIGHT_BYTES["int8" if quantization == "int4" else quantization],
        (layers - dense_layers) * expert // num_ranks,
        num_experts,
        config.num_experts_per_tok if num_experts else 0,
    )


def _attention(config: Any) -> tuple[int, int, int]:
    """Return a layer's weights of attention, the numbers of K a query meets, and those cached of a token."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if rank := getattr(config, "kv_lora_rank", 0):
        nope, rotary, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        params = hidden * (heads * (nope + rotary) + rank + rotary) + rank * heads * (nope + value)
        return params + heads * value * hidden, heads * (nope + rotary + value) // 2, rank + rotary
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = config.num_key_value_heads * head_dim
    return hidden * (2 * heads * head_dim + 2 * kv_heads), heads * head_dim, 2 * kv_heads


def rows_of(
    name: str, work: Work, prompts: Prompts, quantization: str = "none", kv_dtype: str = "auto"
) -> list[Row]:
    """Return the rows of a model; in formats without a bar, the usual ones."""
    bars = BARS.get((name, quantization, kv_dtype), UNKNOWN)
    if name == "0.6b":
        lens, what = prompts.uniform_lens(256, 100, 1024), "256 x 100..1,024 in and out, at once"
    else:
        lens, what = [(512, 128)] * 256, "256 x 512 in / 128 out, at once"
    return [
        throughput_row(work, what, lens, bars.together),
        *(decode_row(work, batch, bar) for batch, bar in bars.decode.items()),
        *(prefill_row(work, length, count, bar) for (length, count), bar in bars.prefill.items()),
    ]


def decode_row(work: Work, batch: int, bar: Bar) -> Row:
    """Return the row of a decode step of `batch` sequences."""
    seen = batch * (CONTEXT + STEPS // 2)
    return Row(
        f"decode step, batch {batch}, context {CONTEXT:,}..{CONTEXT + STEPS:,}",
        "ms",
        bar,
        lambda worker: worker.decode_step_s(batch, CONTEXT, STEPS),
        0,
        work.flops(batch, batch, seen),
        work.bytes_read(1, batch, seen),
    )


def prefill_row(work: Work, length: int, count: int, bar: Bar) -> Row:
    """Return the row of `count` prompts of `length` tokens."""
    tokens = length * count
    return Row(
        f"prefill {length:,} x {count}",
        "ms",
        bar,
        lambda worker: worker.prefill_s(length, count),
        0,
        work.flops(tokens, count, tokens * length // 2),
        work.bytes_read(1, tokens, tokens),
    )


def throughput_row(work: Work, name: str, lens: list[tuple[int, int]], bar: Bar) -> Row:
    """Return the row of requests of (prompt, output) tokens that are there at once."""
    new = sum(prompt + output for prompt, output in lens)
    seen = sum((prompt + output) ** 2 // 2 for prompt, output in lens)
    read = sum(output * prompt + output**2 // 2 for prompt, output in lens)
    tokens = sum(output for _, output in lens)
    return Row(
        name,
        "tok/s",
        bar,
        lambda worker: worker.throughput_s(lens),
        tokens,
        work.flops(new, tokens, seen),
        work.bytes_read(max(output for _, output in lens), len(lens), read),
    )
