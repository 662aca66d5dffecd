"""Copies between a GPU and host memory by the copy engines: the right bytes, and nothing around them."""

import numpy as np
import pytest
import torch

from transfer.gpu import copy_engine

LENGTH = 128 << 10


def test_short_ranges_are_left_to_the_kernel() -> None:
    assert not copy_engine.suits(num_bytes=10 * LENGTH, num_ranges=11)
    assert copy_engine.suits(10 * LENGTH, 10) == torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.parametrize("is_read", [True, False], ids=["host to device", "device to host"])
def test_scattered_ranges_arrive_where_they_should(is_read: bool) -> None:
    sizes = np.array([LENGTH, 16, 3 * LENGTH, LENGTH + 32], np.int64)
    begins = np.array([0, 4 * LENGTH, 5 * LENGTH, 9 * LENGTH], np.int64)
    host = torch.randint(256, (16 * LENGTH,), dtype=torch.uint8).pin_memory()
    device = torch.randint(256, (16 * LENGTH,), dtype=torch.uint8, device="cuda")
    source, target = (host, device) if is_read else (device, host)
    expected = target.cpu().clone()
    for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True):
        expected[begin + 64 : begin + 64 + size] = source[begin : begin + size].cpu()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    sources, targets = source.data_ptr() + begins, target.data_ptr() + 64 + begins
    addresses = [array.ctypes.data for array in (sources, targets, sizes)]
    copy_engine.copy(*addresses, len(sizes), stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(target.cpu(), expected)


@pytest.mark.gpu
def test_a_copy_that_the_driver_refuses_says_so() -> None:
    nowhere, size = np.array([0], np.int64), np.array([16], np.int64)
    addresses = nowhere.ctypes.data, nowhere.ctypes.data, size.ctypes.data
    with pytest.raises(RuntimeError, match="refused a batch of 1"):
        copy_engine.copy(*addresses, 1, torch.cuda.Stream().cuda_stream)
