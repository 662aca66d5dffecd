"""Offsets and sizes of blocks and layers."""

from dataclasses import replace

import pytest

from base.kv_layout import KvField, head_layout, layout_difference

LAYOUT = head_layout(num_layers=30, num_heads=3, head_dim=64, block_size=64, dtype="float32")


def test_layer_slices_tile_a_block_and_blocks_tile_the_cache():
    assert LAYOUT.block_bytes == 30 * LAYOUT.layer_bytes
    assert [LAYOUT.offset(2, layer) for layer in (0, 1)] == [
        2 * LAYOUT.block_bytes,
        2 * LAYOUT.block_bytes + LAYOUT.layer_bytes,
    ]
    assert LAYOUT.offset(1, 30) == LAYOUT.offset(2)


def test_a_token_of_smollm2_takes_46080_bytes():
    assert LAYOUT.token_bytes == 46_080


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (64, 1), (65, 2)])
def test_a_partial_block_is_a_block(tokens, blocks):
    assert LAYOUT.num_blocks(tokens) == blocks


@pytest.mark.parametrize(("field", "value"), [("dtype", "int8"), ("block_size", 24), ("block_size", 0)])
def test_a_layout_that_cannot_be_is_refused_by_name(field, value):
    shape = {"num_layers": 1, "num_heads": 1, "head_dim": 64, "block_size": 64, "dtype": "float32"}
    with pytest.raises(ValueError, match=field):
        head_layout(**shape | {field: value})


def test_layouts_whose_bytes_differ_have_different_ids():
    assert LAYOUT.layout_id != head_layout(30, 3, 64, 64, "bfloat16").layout_id


def test_two_layouts_are_told_apart_by_the_fields_that_differ():
    other = head_layout(30, 3, 64, 64, "bfloat16")
    told = layout_difference(f"{LAYOUT.layout_id}/checksum=xxh3", f"{other.layout_id}/checksum=xxh3")
    assert told == "key 3x64:float32 and 3x64:bfloat16, value 3x64:float32 and 3x64:bfloat16"
    scaled = replace(LAYOUT, fields=(*LAYOUT.fields, KvField("scale", 4, "float32", is_per_token=False)))
    assert layout_difference(LAYOUT.layout_id, scaled.layout_id) == "scale none and 3x4:float32:block"


def test_what_is_kept_for_a_block_counts_once_and_is_aligned():
    scale = KvField("scale", 4, "float32", is_per_token=False)
    scaled = replace(LAYOUT, fields=(*LAYOUT.fields, scale))
    assert scaled.layer_bytes == LAYOUT.layer_bytes + 3 * 16
    with pytest.raises(ValueError, match="width 2 of scale"):
        replace(LAYOUT, fields=(replace(scale, width=2),))
