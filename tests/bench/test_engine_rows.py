"""What rows of `bench.engine` cost at least, and what a profile says of a step."""

import pytest

from bench.engine_rows import BARS, LEVEL_BATCHES, rows_of, work_of
from bench.engine_shapes import SHAPES
from bench.engine_work import Prompts
from bench.step_profile import short_name, summed


def test_a_model_costs_what_its_parameters_say() -> None:
    dense = work_of(SHAPES["8b"], 1)
    assert dense.bytes_read(1, 1, 0) == pytest.approx(2 * 7.50e9, rel=0.01)  # without embeddings
    assert dense.kv_token_bytes == 32 * 2 * 8 * 128 * 2
    routed = work_of(SHAPES["qwen3-30b-a3b"], 1)
    all_weights = routed.bytes_read(1, 100_000, 0)
    assert all_weights == pytest.approx(2 * 30.2e9, rel=0.02)
    assert routed.bytes_read(1, 1, 0) == pytest.approx(2 * 3.04e9, rel=0.02)
    assert routed.flops(1, 1, 0) == pytest.approx(2 * 3.04e9, rel=0.02)
    latent = work_of(SHAPES["deepseek-v2-lite"], 1)
    assert latent.kv_token_bytes == 27 * 1152
    assert latent.bytes_read(1, 100_000, 0) == pytest.approx(2 * 15.5e9, rel=0.02)


def test_fewer_bits_are_fewer_bytes() -> None:
    floats, eight, four = (
        work_of(SHAPES["8b"], 1, name, kv).bytes_read(1, 1, 0)
        for name, kv in (("none", "auto"), ("fp8", "fp8"), ("int4", "auto"))
    )
    assert eight == floats / 2
    assert 0.25 < four / floats < 0.32
    assert (
        work_of(SHAPES["8b"], 1, "none", "fp8").kv_token_bytes * 2 == work_of(SHAPES["8b"], 1).kv_token_bytes
    )


@pytest.mark.parametrize("key", [*BARS, ("8b", "int8", "fp8")])
def test_every_model_and_format_has_rows_of_different_names(key: tuple[str, str, str]) -> None:
    model, *formats = key
    rows = rows_of(model, work_of(SHAPES[model], 1, *formats), Prompts(100, 0), *formats)
    assert len({row.workload for row in rows}) == len(rows) >= 1 + len(LEVEL_BATCHES) - 1
    for row in rows:
        assert row.flops > 0 < row.bytes_read
        if row.bar.must is not None and row.bar.aim is not None:
            assert (row.bar.aim >= row.bar.must) == (row.unit == "tok/s") or row.bar.aim == row.bar.must


def test_a_profile_shows_kernels_and_the_time_between_them() -> None:
    spans = [(0.0, 4.0, "void a::first<int>(float*)"), (6.0, 8.0, "second"), (7.0, 10.0, "second")]
    profile = summed(spans, 8, steps=2)
    assert (profile.step_us, profile.busy) == (5.0, 0.8)
    assert [(each.name, each.count, each.us) for each in profile.kernels] == [
        ("second", 1.0, 2.5),
        ("first", 0.5, 2.0),
    ]
    assert (
        short_name("void at::native::vectorized_elementwise_kernel<4, at::Sum>(int)")
        == "vectorized_elementwise_kernel"
    )
