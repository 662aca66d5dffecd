"""KV that prefill ranks have in parts arrives in the parts that decode ranks have, byte for byte."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from base.kv_layout import (
    KvField,
    KvPart,
    PartRuns,
    all_of,
    head_layout,
    is_partition,
    part_columns,
    part_runs,
    whole_layout,
)

HEADS = head_layout(num_layers=4, num_heads=4, head_dim=3, block_size=16, dtype="float32")
LATENTS = replace(
    HEADS,
    fields=(
        KvField("latent", 8, "bfloat16", has_heads=False),
        KvField("rotary_key", 3, "bfloat16", has_heads=False),
    ),
)
SCALED = replace(
    HEADS,
    fields=(
        KvField("key", 3, "float8_e4m3fn"),
        KvField("state", 4, "float32", has_heads=False, is_per_token=False),
        KvField("value", 5, "float8_e4m3fn"),
        KvField("scale", 4, "float32", is_per_token=False),
    ),
)
LAYOUTS = {"heads": HEADS, "latents": LATENTS, "scaled": SCALED}
WHOLE = all_of(HEADS)
GROUPS = [(tensor, stages) for tensor in (1, 2, 4) for stages in (1, 2, 4)]


def parts_of(tensor, stages):
    layers, heads = 4 // stages, 4 // tensor
    return [
        KvPart(stage * layers, layers, place * heads, heads)
        for stage in range(stages)
        for place in range(tensor)
    ]


def own_bytes(layout, block, part):
    """Return what a rank with `part` of a block has, as it lies in its memory."""
    return np.concatenate(part_columns(block[None], layout, part), axis=1)[0]


def sent(layout, block, sources, targets):
    """Move a block from ranks with `sources` to ranks with `targets`; return what these have then."""
    memories = [np.zeros(part.of(layout).block_bytes, np.uint8) for part in targets]
    for source, (target, memory) in itertools.product(sources, zip(targets, memories, strict=True)):
        both = source.share_for(target)
        if both is None:
            continue
        runs = part_runs(layout, both, source, target)
        own = own_bytes(layout, block, source)
        for start, end, length in zip(runs.source_offsets, runs.target_offsets, runs.lengths, strict=True):
            assert not memory[end : end + length].any(), "written twice"
            memory[end : end + length] = own[start : start + length]
    return memories


def some_block(layout):
    # No byte is 0, so that what was not written is seen.
    return np.random.default_rng(1).integers(1, 256, layout.block_bytes, np.uint8)


def assert_each_has_its_part(layout, sources, targets):
    block = some_block(layout)
    for memory, part in zip(sent(layout, block, sources, targets), targets, strict=True):
        assert np.array_equal(memory, own_bytes(layout, block, part))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("prefill", "decode"), list(itertools.product(GROUPS, GROUPS)))
def test_every_pair_of_groups_hands_over_every_byte_once(prefill, decode, kind):
    assert_each_has_its_part(LAYOUTS[kind], parts_of(*prefill), parts_of(*decode))


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
@given(uneven_parts(), uneven_parts(), st.sampled_from(sorted(LAYOUTS)))
def test_parts_of_any_sizes_hand_over_every_byte_once(sources, targets, kind):
    assert_each_has_its_part(LAYOUTS[kind], sources, targets)


@settings(max_examples=20)
@given(uneven_parts(), st.data())
def test_parts_with_one_left_out_or_doubled_are_no_partition(parts, data):
    shares = [part.share_for(WHOLE) for part in parts]
    assert is_partition(shares, WHOLE)
    assert is_partition(parts, WHOLE) == all(part.num_heads == 4 for part in parts)
    assert whole_layout(parts[0].of(HEADS), parts) == HEADS
    parts, one = shares, data.draw(st.sampled_from(shares))
    assert not is_partition([part for part in parts if part != one], WHOLE)
    assert not is_partition([*parts, one], WHOLE)


def test_layers_with_the_same_heads_are_one_run():
    for layout in LAYOUTS.values():
        runs = part_runs(layout, KvPart(2, 2, 0, 4), KvPart(1, 3, 0, 4), WHOLE)
        layer = layout.layer_bytes
        assert runs == PartRuns((layer,), (2 * layer,), (2 * layer,))
