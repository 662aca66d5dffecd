"""New K and V land in their slots and nowhere else."""

import pytest
import torch

from engine.kernels.write_kv import write_kv
from tests.engine.definitions import write_kv_definition
from tests.engine.kernels.paged import DEVICE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (3, 80), (8, 128), (2, 256)])
def test_kernel_and_definition_leave_the_same_cache(
    dtype: torch.dtype, num_kv_heads: int, head_dim: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    caches = [torch.zeros(5, 2, 2, 16, num_kv_heads, head_dim, dtype=dtype, device=DEVICE) for _ in range(2)]
    slots = torch.randperm(80, generator=generator)[:30]
    slots[7] = -1
    key, value = torch.randn(2, 30, num_kv_heads, head_dim, generator=generator).to(DEVICE, dtype)
    for write, cache in zip((write_kv, write_kv_definition), caches, strict=True):
        write(key, value, cache[:, 1], slots.to(DEVICE))
    assert torch.equal(*caches)
    assert int(caches[0].count_nonzero()) == 29 * 2 * num_kv_heads * head_dim


def test_key_and_value_may_be_slices_of_one_projection() -> None:
    packed = torch.randn(4, 3, 2, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    cache = torch.zeros(2, 2, 16, 2, 64, device=DEVICE)
    write_kv(packed[:, 1], packed[:, 2], cache, torch.arange(14, 18, device=DEVICE))
    assert torch.equal(cache[0, 0, 14:], packed[:2, 1])
    assert torch.equal(cache[1, 1, :2], packed[2:, 2])


def test_no_tokens_are_no_launch() -> None:
    cache = torch.zeros(2, 2, 16, 2, 64, device=DEVICE)
    empty = torch.zeros(0, 2, 64, device=DEVICE)
    write_kv(empty, empty, cache, torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert not cache.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"key": a["key"].half()}, "key is"),
        (lambda a: a | {"value": a["value"][:, :1]}, "do not fit"),
        (lambda a: a | {"slots": a["slots"].short()}, "slots"),
        (
            lambda a: a | {"kv_cache": a["kv_cache"].transpose(2, 3).contiguous().transpose(2, 3)},
            "contiguous",
        ),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(change, message: str) -> None:
    arguments = {
        "key": torch.zeros(3, 2, 64, device=DEVICE),
        "value": torch.zeros(3, 2, 64, device=DEVICE),
        "kv_cache": torch.zeros(2, 2, 16, 2, 64, device=DEVICE),
        "slots": torch.arange(3, device=DEVICE),
    }
    with pytest.raises(ValueError, match=message):
        write_kv(**change(arguments))
