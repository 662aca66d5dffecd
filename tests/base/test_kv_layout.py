"""Offsets and sizes of blocks and layers."""

import pytest

from base.kv_layout import KvLayout

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=64, dtype="float32")


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
    shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, "block_size": 64, "dtype": "float32"}
    with pytest.raises(ValueError, match=field):
        KvLayout(**shape | {field: value})


def test_layouts_whose_bytes_differ_have_different_ids():
    assert LAYOUT.layout_id != KvLayout(30, 3, 64, 64, "bfloat16").layout_id
