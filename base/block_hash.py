"""Block hash chain: the content address of KV cache blocks.

The KV values of a token depend on every token before it, so a block is named by
a hash over (hash of the block before it, its own token ids). Two prompts that
share their first n full blocks share exactly their first n hashes, and the
longest stored prefix is found by walking the chain up to the first miss.

The chain's root mixes in everything else that the bytes depend on (model, layout)
and everything that must keep two parties apart (tenant salt, `cache_salt`).

Why SHA-256 and not a faster hash: these names decide whose cached bytes a request
reads. A collision would serve one prompt the KV values of another, so the hash has
to resist collisions, not merely spread well. hashlib uses the processor's SHA
instructions: a 128k-token prompt costs 4 ms at 512-token blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""16 bytes; names one full block together with all tokens before it."""

HASH_BYTES = 16
"""128 bits of SHA-256: a collision needs 2^64 work, and the index stays small."""


@lru_cache(maxsize=4096)
def chain_root(model_id: str, layout_id: str, tenant_salt: str = "", cache_salt: str = "") -> BlockHash:
    """Return the hash that stands before a prompt's first block.

    Args:
        model_id: Names the weights (content digest or name and revision).
        layout_id: `KvLayout.layout_id`; equal ids mean interchangeable bytes.
        tenant_salt: Keeps tenants from seeing each other's blocks.
        cache_salt: The request's own salt, as in the OpenAI extension.
    """
    digest = hashlib.sha256()
    for part in (model_id, layout_id, tenant_salt, cache_salt):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    return BlockHash(digest.digest()[:HASH_BYTES])


def hash_chain(token_ids: Sequence[int], block_size: int, root: BlockHash) -> list[BlockHash]:
    """Return the hash of every full block of `token_ids`, first to last.

    The last, partial block has no hash: it can still grow.

    Args:
        token_ids: Each in [0, 2^32).
        block_size: Tokens per block.
        root: From `chain_root`.
    """
    packed = memoryview(array("I", token_ids)).cast("B")
    stride = block_size * 4
    chain = []
    parent = root
    for start in range(0, len(token_ids) // block_size * stride, stride):
        parent = BlockHash(hashlib.sha256(parent + packed[start : start + stride]).digest()[:HASH_BYTES])
        chain.append(parent)
    return chain
