"""`python -m tests.engine.kernels.compile_products`: compile, for an H100, what tests interpret.

Triton's interpreter runs what its compiler refuses, such as a name of two types. The compiler's front end
finds it in two seconds; `--whole` has the rest run as well, which takes two minutes.
"""

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import ir, make_backend

torch.cuda.is_available = lambda: True  # kernels are as they are on a GPU

from engine.kernels import (  # noqa: E402 after the line above
    decode_parts,
    expanded_latents,
    grouped_experts,
    join_pieces,
    key_parts,
    many_pairs,
    nibble_product,
    one_token_experts,
    paged_decode,
    paged_latents,
    paged_prefill,
    quantized_product,
    streamed_product,
)

IS_WHOLE = "--whole" in sys.argv
TARGET = GPUTarget("cuda", 90, 32)
SIZES = dict.fromkeys(("num_rows", "out_features", "in_features", "num_groups"), "i32")
SHARED = {"output": "*bf16", "partial": "*fp32", "counters": "*i32"}


def compile_kernel(kernel: Any, arguments: dict[str, str], **constants: int) -> None:
    if "OVERLAPS" in kernel.arg_names:
        constants["OVERLAPS"] = 1
    signature = arguments | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    launch = {"num_warps": 4, "num_stages": 3}
    if IS_WHOLE:
        triton.compile(source, target=TARGET, options=launch)
        return
    backend, context = make_backend(TARGET), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(launch)
    functions = backend.get_codegen_implementation(options)
    source.make_ir(TARGET, options, functions, backend.get_module_map(), context)


def compile_order(is_counted: int) -> None:
    tally = {"choices": "*i64" if is_counted else "*i32", "slots": "*i32"}
    sizes = dict.fromkeys(("num_pairs", "num_experts", "num_chosen"), "i32")
    places = dict.fromkeys(("order", "starts", "cursors"), "*i32")
    compile_kernel(
        grouped_experts._order_pairs, {"experts": "*i64"} | places | tally | sizes,
        IS_COUNTED=is_counted, PAIRS_PAD=2048, EXPERTS_PAD=256,
    )  # fmt: skip
    compile_kernel(
        many_pairs._count, {"chosen": "*i64", "counts": "*i32"} | tally | sizes,
        IS_COUNTED=is_counted, TILE=1024, EXPERTS_PAD=256,
    )  # fmt: skip


def compile_experts(levels: str, group: int, dtype: str = "*bf16") -> None:
    is_scaled = int(levels != dtype)
    scales = {"scales": ("*i32" if levels == "*u8" else "*fp32") if is_scaled else dtype}
    sizes = dict.fromkeys(("num_experts", "hidden", "inner"), "i32")
    order = dict.fromkeys(("order", "starts"), "*i32")
    gate_up = {"rows": dtype, "gate_up": levels} | scales | {"between": dtype}
    down = {"between": dtype, "down": levels} | scales | {"output": dtype}
    tile = {"ROWS": 32, "COLUMNS": 64, "STEP": min(group or 128, 128), "IS_SCALED": is_scaled, "GROUP": group}
    compile_kernel(grouped_experts._gate_up_tile, gate_up | order | sizes | {"num_chosen": "i32"}, **tile)
    compile_kernel(grouped_experts._down_tile, down | order | sizes, **tile)
    row = {"row": dtype, "gate_up": levels} | scales | {"between": dtype, "experts": "*i64"}
    row |= {"choices": "*i64", "slots": "*i32"} | sizes
    of_scales = {"IS_SCALED": is_scaled, "GROUP": group}
    compile_kernel(one_token_experts._gate_up_rows, row, IS_COUNTED=1, COLUMNS=2, STEP=2048, **of_scales)
    down |= {"experts": "*i64", "weights": dtype} | sizes | {"num_chosen": "i32"}
    compile_kernel(one_token_experts._down_rows, down, CHOSEN_PAD=8, COLUMNS=2, STEP=256, **of_scales)


def compile_chunks(parts: int) -> None:
    """Compile attention of chunks; what is not named here is a number."""
    tables = dict.fromkeys(("block_tables", "query_starts", "context_lens"), "*i32")
    written = {"output": "*bf16", "results": "*fp32", "log_sums": "*fp32"}
    scale = {"scale": "fp32"}
    heads = dict.fromkeys(("query", "kv_cache", "scales", "sinks"), "*bf16") | {"soft_cap": "fp32"} | scale
    latents = dict.fromkeys(("latent_query", "rotary_query", "latents", "rotary_keys"), "*bf16") | scale
    tile = {"ROWS": 64, "TILE": 64, "PARTS": parts, "LEAST_KEYS": 512}
    blocks = {"BLOCK_SIZE": 64}
    plain = {"SOFT_CAP": 0, "SINKS": 1, "SCALED": 0, "GROUP": 4, "DIM": 128, "DIM_PAD": 128} | blocks
    places = {"CAPACITY": 4096, "LEAST": 128, "STEP": 128, "SEQS_PAD": 4}
    rotary = {"ROTARY": 16, "ROTARY_PAD": 16}
    narrow = {"RANK": 64, "RANK_PAD": 64, "HEADS": 16} | rotary | places | blocks
    halves = {"NOPE": 80, "NOPE_PAD": 128, "VALUE": 80, "VALUE_PAD": 128} | rotary | places
    made = dict.fromkeys(("query", "heads", "rotary"), "*bf16") | scale
    lengths = {name: tables[name] for name in ("query_starts", "context_lens")}
    for kernel, known, constants in (
        (paged_prefill._prefill_tile, heads | tables | written, tile | plain | {"WINDOW": 0}),
        (paged_prefill._prefill_tile, heads | tables | written, tile | plain | {"WINDOW": 128}),
        (paged_latents._prefill_tile, latents | tables | written, tile | narrow),
        (expanded_latents._prefill_tile, made | lengths | written, tile | halves),
    ):
        others = dict.fromkeys(set(kernel.arg_names) - set(known) - set(constants), "i32")
        compile_kernel(kernel, known | others, **constants)
        del others["num_tokens"]
        compile_kernel(kernel, known | others, num_tokens=1, **constants)  # a number of 1 is a constant
    kernel = expanded_latents._expand_tiles
    known = dict.fromkeys(("latents", "rotary_keys", "weight", "heads", "rotary"), "*bf16") | tables
    constants = halves | blocks | {"TILE": 128, "RANK": 80, "RANKS": 64}
    del constants["STEP"]
    others = dict.fromkeys(set(kernel.arg_names) - set(known) - set(constants), "i32")
    compile_kernel(kernel, known | others, **constants)
    wide = {"NOPE": 160, "NOPE_PAD": 256, "VALUE": 160, "VALUE_PAD": 256}
    compile_kernel(kernel, known | others, **(constants | wide))
    if parts > 1:
        sizes = dict.fromkeys(("num_seqs", "num_heads"), "i32")
        joined = {"PARTS": parts, "HEADS": 8, "DIM": 80, "DIM_PAD": 128}
        kernel, known = key_parts._join_rows, written | {"query_starts": "*i32"} | sizes
        compile_kernel(kernel, known | {"num_tokens": "i32"}, **joined)
        compile_kernel(kernel, known, num_tokens=1, **joined)


def compile_decode(levels: str, dim: int, block_size: int) -> None:
    """Compile attention of one token each; what is not named here is a number."""
    is_scaled = int(levels != "*bf16")
    known = dict.fromkeys(("query", "key", "value", "sinks", "output"), "*bf16") | {"kv_cache": levels}
    known |= {"scales": "*fp32" if is_scaled else "*bf16", "scale": "fp32", "soft_cap": "fp32"}
    known |= dict.fromkeys(("block_tables", "context_lens", "parts", "groups"), "*i32")
    known |= dict.fromkeys(("partial", "log_sums"), "*fp32")
    constants = {"SINKS": 1, "SCALED": is_scaled, "ADDED": 1, "GROUP": 4, "ON_DEVICE": 1}
    constants |= {"GROUP_PAD": 16}
    constants |= {"DIM": dim, "DIM_PAD": 128, "BLOCK_SIZE": block_size, "TILE": 32}
    others = set(paged_decode._decode_part.arg_names) - set(known) - set(constants)
    numbers = dict.fromkeys(others - {"WINDOW", "SOFT_CAP", "MEMBERS", "OVERLAPS"}, "i32")
    for limits in ({"WINDOW": 0, "SOFT_CAP": 0}, {"WINDOW": 128, "SOFT_CAP": 1}):
        members = 1 if limits["WINDOW"] else 4
        compile_kernel(paged_decode._decode_part, known | numbers, **constants, **limits, MEMBERS=members)


def compile_parts(members: int) -> None:
    lists = dict.fromkeys(("context_lens", "parts", "groups"), "*i32")
    sizes = dict.fromkeys(("num_seqs", "count", "apart"), "i32")
    shares = {"WINDOW": 0, "SHARES": int(members > 1), "SEQS_PAD": 64, "AT_ONCE": 16}
    compile_kernel(decode_parts._cut, lists | sizes, **shares)
    pieces = {"partial": "*fp32", "log_sums": "*fp32", "parts": "*i32", "count": "i32", "num_heads": "i32"}
    rows = {"SINKS": 1, "DIM": 80, "DIM_PAD": 128, "WIDTH": 128, "ROWS": 4}
    compile_kernel(join_pieces._join_pieces, pieces | {"sinks": "*bf16", "output": "*bf16"}, **rows)


def main() -> None:
    for levels, dim, block_size in (("*bf16", 80, 16), ("*bf16", 128, 64), ("*fp8e4nv", 80, 64)):
        compile_decode(levels, dim, block_size)
    for members in (1, 4):
        compile_parts(members)
    for parts in (1, 8):
        compile_chunks(parts)
    for is_counted in (0, 1):
        compile_order(is_counted)
    for levels, groups in {"*bf16": (0,), "*fp8e4nv": (0, 128), "*i8": (0,), "*u8": (128, 8192)}.items():
        for group in groups:
            compile_experts(levels, group)
    for parts in (1, 8):
        for levels, group, has_zeros in (("*fp8e4nv", 0, 0), ("*i8", 64, 1)):
            weight = {"rows": "*bf16", "levels": levels, "scales": "*fp32", "zeros": "*fp32"}
            compile_kernel(
                quantized_product._few_rows, weight | SHARED | SIZES,
                ROWS=16, COLUMNS=64, PARTS=parts, STEP=group or 128, GROUP=group, HAS_ZEROS=has_zeros,
            )  # fmt: skip
            for sums, rows in ((1, 64), (0, 256)):
                compile_kernel(
                    quantized_product._row_tile, weight | SHARED | SIZES,
                    ROWS=rows, COLUMNS=64, PARTS=parts, STEP=group or 128, GROUP=group, HAS_ZEROS=has_zeros,
                    EVEN=1, BITS=1, SUMS=sums,
                )  # fmt: skip
        sizes = dict.fromkeys(("num_rows", "out_features", "in_features"), "i32")
        for dtype, is_scaled in (("*fp8e4nv", 1), ("*bf16", 0)):
            sides = {"rows": dtype, "row_scales": "*fp32", "weight": dtype, "scales": "*fp32"}
            compile_kernel(
                streamed_product._weight_tile, sides | SHARED | sizes,
                ROWS=32, COLUMNS=64, PARTS=parts, STEP=128, SCALED=is_scaled,
            )  # fmt: skip
        nibbles = {"rows": "*bf16", "levels": "*u8", "grid": "*i32"} | SHARED
        nibbles |= sizes
        for sums, rows in ((1, 8), (0, 128)):
            compile_kernel(
                nibble_product._row_tile, nibbles | {"num_units": "i32", "units_per_group": "i32"},
                HALF=16 if sums else 64, ROWS=rows, COLUMNS=64, PARTS=parts, EVEN=1, SUMS=sums,
            )  # fmt: skip


if __name__ == "__main__":
    main()
