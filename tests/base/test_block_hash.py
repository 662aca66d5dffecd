"""The hash chain names prefixes: shared for shared prefixes, different for all else."""

import hashlib
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from base.block_hash import HASH_BYTES, chain_root, hash_chain

ROOT = chain_root("model", "layout")


def following_hash(parent, token_ids):
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()[:HASH_BYTES]


TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=80)


@given(TOKENS, TOKENS)
def test_prompts_share_exactly_the_hashes_of_their_shared_full_blocks(first, second):
    shared = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        shared += 1
    chains = hash_chain(first, 16, ROOT), hash_chain(second, 16, ROOT)
    equal = [one == other for one, other in zip(*chains, strict=False)]
    assert equal == [block < shared // 16 for block in range(len(equal))]


@given(TOKENS)
def test_a_chain_grows_block_by_block_as_it_does_at_once(token_ids):
    chain = []
    for start in range(0, len(token_ids) // 16 * 16, 16):
        chain.append(following_hash(chain[-1] if chain else ROOT, token_ids[start : start + 16]))
    assert hash_chain(token_ids, 16, ROOT) == chain


def test_a_partial_block_has_no_hash():
    assert hash_chain(range(15), 16, ROOT) == []


@pytest.mark.parametrize(
    "other",
    [
        chain_root("model2", "layout"),
        chain_root("model", "layout2"),
        chain_root("model", "layout", tenant_salt="a"),
        chain_root("model", "layout", cache_salt="a"),
        chain_root("mode", "llayout"),
    ],
)
def test_what_the_bytes_depend_on_and_what_keeps_parties_apart_changes_the_root(other):
    assert other != ROOT
    assert len(other) == HASH_BYTES
    assert not set(hash_chain(range(64), 16, other)) & set(hash_chain(range(64), 16, ROOT))


def test_names_do_not_depend_on_the_process():
    # Written down once: an index or a store must survive a restart and a second machine.
    assert hash_chain(range(16), 16, ROOT)[0].hex() == "8d46b119510ff3c70ea00742be7be305"
