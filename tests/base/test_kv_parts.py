"""KV that prefill ranks have in parts arrives in the parts that decode ranks have, byte for byte."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from base.kv_layout import KvLayout, KvPart, is_partition, part_runs, whole_layout

LAYOUT = KvLayout(num_layers=4, num_kv_heads=4, head_dim=3, block_size=16, dtype="float32")
WHOLE = KvPart(0, 4, 0, 4)
GROUPS = [(tensor, stages) for tensor in (1, 2, 4) for stages in (1, 2, 4)]


def parts_of(tensor, stages):
    layers, heads = 4 // stages, 4 // tensor
    return [
        KvPart(stage * layers, layers, place * heads, heads)
        for stage in range(stages)
        for place in range(tensor)
    ]


def own_bytes(block, part):
    """Return what a rank with `part` of a block has, as it lies in its memory."""
    layers = slice(part.first_layer, part.first_layer + part.num_layers)
    heads = slice(part.first_head, part.first_head + part.num_heads)
    return np.ascontiguousarray(block[layers, :, :, heads]).view(np.uint8).ravel()


def sent(block, sources, targets):
    """Move a block from ranks with `sources` to ranks with `targets`; return what these have then."""
    memories = [np.zeros(part.of(LAYOUT).block_bytes, np.uint8) for part in targets]
    for source, (target, memory) in itertools.product(sources, zip(targets, memories, strict=True)):
        both = source.overlap(target)
        if both is None:
            continue
        runs = part_runs(LAYOUT, both, source, target)
        own = own_bytes(block, source)
        for start, end in zip(runs.source_offsets, runs.target_offsets, strict=True):
            assert not memory[end : end + runs.length].any(), "written twice"
            memory[end : end + runs.length] = own[start : start + runs.length]
    return memories


def some_block():
    numbers = np.random.default_rng(1).integers(1, 2**31, LAYOUT.block_shape)
    # No byte is 0, so that what was not written is seen.
    return (numbers | 0x01010101).astype(np.int32)


@pytest.mark.parametrize(("prefill", "decode"), list(itertools.product(GROUPS, GROUPS)))
def test_every_pair_of_groups_hands_over_every_byte_once(prefill, decode):
    block, targets = some_block(), parts_of(*decode)
    for memory, part in zip(sent(block, parts_of(*prefill), targets), targets, strict=True):
        assert np.array_equal(memory, own_bytes(block, part))


cuts = st.lists(st.integers(1, 3), unique=True, max_size=3).map(lambda some: [0, *sorted(some), 4])


@st.composite
def uneven_parts(draw):
    """Layers in ranges of any sizes, and in each of them heads too."""
    parts = []
    for first, end in itertools.pairwise(draw(cuts)):
        parts += [
            KvPart(first, end - first, head, last - head) for head, last in itertools.pairwise(draw(cuts))
        ]
    return draw(st.permutations(parts))


@settings(max_examples=20)
@given(uneven_parts(), uneven_parts())
def test_parts_of_any_sizes_hand_over_every_byte_once(sources, targets):
    block = some_block()
    for memory, part in zip(sent(block, sources, targets), targets, strict=True):
        assert np.array_equal(memory, own_bytes(block, part))


@settings(max_examples=20)
@given(uneven_parts(), st.data())
def test_parts_with_one_left_out_or_doubled_are_no_partition(parts, data):
    assert is_partition(parts, WHOLE)
    assert whole_layout(parts[0].of(LAYOUT), parts) == LAYOUT
    one = data.draw(st.sampled_from(parts))
    assert not is_partition([part for part in parts if part != one], WHOLE)
    assert not is_partition([*parts, one], WHOLE)


def test_layers_with_the_same_heads_are_one_run():
    runs = part_runs(LAYOUT, KvPart(2, 2, 0, 4), KvPart(1, 3, 0, 4), WHOLE)
    layer = LAYOUT.layer_bytes
    assert (runs.source_offsets, runs.target_offsets, runs.length) == ((layer,), (2 * layer,), 2 * layer)
