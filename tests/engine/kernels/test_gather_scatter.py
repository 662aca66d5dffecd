"""Scattered ranges arrive where they should, byte for byte, and nothing else changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.gather_scatter import gather_scatter, gather_scatter_definition
from tests.engine.kernels.paged import DEVICE


@settings(max_examples=25, deadline=None)
@given(
    range_bytes=st.sampled_from([16, 48, 1024, 16384, 16400, 40000]),
    num_ranges=st.integers(0, 5),
    seed=st.integers(0, 2**20),
)
def test_kernel_and_definition_move_the_same_bytes(range_bytes: int, num_ranges: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(0, 256, (range_bytes * 8 + 16,), generator=generator, dtype=torch.uint8)
    source_offsets = torch.randint(0, range_bytes // 16 * 7 + 1, (num_ranges,), generator=generator) * 16
    target_offsets = torch.randperm(7, generator=generator)[:num_ranges] * range_bytes + 16
    targets = [torch.full_like(source, 7) for _ in range(2)]
    for move, target in zip((gather_scatter, gather_scatter_definition), targets, strict=True):
        on_device = target.to(DEVICE)
        move(
            source.to(DEVICE),
            source_offsets.to(DEVICE),
            on_device,
            target_offsets.to(DEVICE),
            range_bytes,
        )
        target.copy_(on_device)
    assert torch.equal(*targets)


def test_blocks_of_a_block_major_cache_move_whole_and_by_layer() -> None:
    source, target = torch.randn(2, 6, 3, 2, 16, 2, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    block_bytes = source[0].numel() * 4
    layer_bytes = block_bytes // 3
    expected = target.clone()
    expected[[5, 0]] = source[[1, 4]]
    expected[2, 1] = source[3, 1]
    flat = [tensor.view(-1).view(torch.uint8) for tensor in (source, target)]

    def at(*offsets: int) -> torch.Tensor:
        return torch.tensor(offsets, device=DEVICE)

    gather_scatter(flat[0], at(block_bytes, 4 * block_bytes), flat[1], at(5 * block_bytes, 0), block_bytes)
    gather_scatter(
        flat[0],
        at(3 * block_bytes + layer_bytes),
        flat[1],
        at(2 * block_bytes + layer_bytes),
        layer_bytes,
    )
    assert torch.equal(target, expected)


@pytest.mark.gpu
def test_pinned_host_memory_is_a_source_and_a_target() -> None:
    host = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8).pin_memory()
    device = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    back = torch.zeros(1 << 20, dtype=torch.uint8).pin_memory()
    offsets = torch.arange(0, 1 << 20, 4096, device="cuda")
    gather_scatter(host, offsets, device, offsets.flip(0), 4096)
    gather_scatter(device, offsets.flip(0), back, offsets, 4096)
    torch.cuda.synchronize()  # the test reads what the device wrote
    assert torch.equal(host, back)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"source": a["source"].view(torch.int32)}, "source"),
        (lambda a: a | {"target": a["target"][1:]}, "target does not start"),
        (lambda a: a | {"range_bytes": 24}, "range_bytes"),
        (lambda a: a | {"range_bytes": 0}, "range_bytes"),
        (lambda a: a | {"source_offsets": a["source_offsets"][:1]}, "num_ranges"),
        (lambda a: a | {"target_offsets": a["target_offsets"].int()}, "int64"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(change, message: str) -> None:
    arguments = {
        "source": torch.zeros(256, dtype=torch.uint8, device=DEVICE),
        "source_offsets": torch.tensor([0, 32], device=DEVICE),
        "target": torch.zeros(256, dtype=torch.uint8, device=DEVICE),
        "target_offsets": torch.tensor([64, 0], device=DEVICE),
        "range_bytes": 32,
    }
    with pytest.raises(ValueError, match=message):
        gather_scatter(**change(arguments))
