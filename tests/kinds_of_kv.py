"""What a model may keep of each token: what moves, sums, stores, lends or cuts blocks is tried with all."""

KINDS = {
    "heads": ("llama with all heads", "auto"),
    "heads in 8 bits": ("llama with all heads", "fp8"),
    "latents": ("deepseek_v2", "auto"),
}
"""A family of `tests/engine/test_families.py`, all of four heads, and `engine.kv_dtype`."""
