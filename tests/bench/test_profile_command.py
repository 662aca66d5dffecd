"""`conductor profile` measures what it says, through a real engine of a tiny model."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from base.clock import SystemClock
from base.config import EngineConfig
from bench import engine_shapes, profile_log
from bench.profile_command import SHAPES, main, make_parser, print_profile
from bench.profile_fit import Measured, MeasuredStep, with_steps
from bench.profile_run import Grid, make_profile, measure
from conductor.placing.cost_model import CostModel
from conductor.placing.profile import profile_json
from conductor.profiles.reader import load_profile
from conductor.replay.pipeline import grouped
from engine.build import assemble_engine
from engine.model import PagedModel
from engine.quantized_weight import Quantization
from tests.engine.test_gpu_model import make_family

GRID = Grid(
    new_tokens=(16, 32, 64),
    prefixes=(0, 32),
    batches=(1, 2, 3),
    contexts=(16, 48),
    steps=2,
    repeats=1,
    busy_s=0.0,
    chunks=(8, 16),
    chunk_prefixes=(0, 32),
    beside=((0, 24), (1, 24), (3, 24), (3, 8)),
    chunk_steps=3,
)


def test_a_profile_holds_each_point_of_the_grid_and_what_it_says_to_them(tmp_path, capsys) -> None:
    config = EngineConfig("cpu", "float32", 16, 0.01, chunk_tokens=64, max_batch=8)
    model = PagedModel(make_family("llama"))
    model.quantization = Quantization("int8", 0.01)
    engine = assemble_engine(config, model, SystemClock())
    points = asyncio.run(measure(engine, GRID))
    assert engine.scheduler.chunk_tokens == 64
    engine.pool.check()
    assert all(point.seconds > 0 for point in [*points.prefill, *points.decode, *points.steps])
    # How long a tiny model takes for 16 and for 64 tokens is alike on a busy machine, and no profile then.
    points.prefill[:] = [replace(point, seconds=0.001 + 1e-4 * point.tokens) for point in points.prefill]
    points.decode[:] = [replace(point, seconds=0.001 + 1e-5 * point.tokens) for point in points.decode]
    profile = make_profile(make_parser().parse_args(["--dispatch-s", "0.002"]), engine, points)
    file = tmp_path / "profile.json"
    file.write_text(profile_json(profile))
    assert load_profile(str(file)) == profile
    asked = [(step.chunk_tokens, step.prefix_tokens, step.batch) for step in profile.evidence.steps]
    assert asked == [
        (chunk - batch, prefix + 1.5 * (chunk - batch), batch)
        for prefix in (0, 32)
        for chunk in (8, 16)
        for batch in (0, 1, 3, 3)
    ]
    assert all(step.measured_s > 0 for step in profile.evidence.steps)
    assert profile.chunk_step_s > 0
    assert profile.dispatch_s == 0.002
    assert (profile.quantization, profile.kv_dtype) == ("int8", "float32")
    print_profile(profile)
    assert capsys.readouterr().out.count("%") == 6 + 6 + 16 + 4


@pytest.mark.parametrize(
    ("family", "kv_dtype", "cached"),
    [("deepseek_v3", "auto", "float32"), ("mixtral", "fp8", "float8_e4m3fn")],
)
def test_latents_experts_and_kv_of_8_bits_are_measured_and_named(
    family: str, kv_dtype: str, cached: str
) -> None:
    config = EngineConfig("cpu", "float32", 16, 0.01, chunk_tokens=64, max_batch=8, kv_dtype=kv_dtype)
    engine = assemble_engine(config, PagedModel(make_family(family)), SystemClock())
    points = asyncio.run(measure(engine, GRID))
    assert all(point.seconds > 0 for point in [*points.prefill, *points.decode, *points.steps])
    points.prefill[:] = [replace(point, seconds=0.001 + 1e-4 * point.tokens) for point in points.prefill]
    points.decode[:] = [replace(point, seconds=0.001 + 1e-5 * point.tokens) for point in points.decode]
    profile = make_profile(make_parser().parse_args([]), engine, points)
    assert (profile.kv_dtype, profile.kv_token_bytes) == (cached, engine.layout.token_bytes)
    assert profile.expert_share > 0


def test_what_prompts_and_steps_take_is_found() -> None:
    costs = {
        "prefill_token_s": 2e-5,
        "prefill_token2_s": 4e-10,
        "chunk_step_s": 0.007,
        "mixed_step_s": 0.002,
        "chunk_sequence_s": 4e-5,
        "chunk_token2_s": 7e-10,
        "attention_rows": 512,
    }
    kernels = {"step_tokens": (128, 256, 512, 768, 1024, 2048), "long_chunk_tokens": 1024}
    known = replace(load_profile("h200-llama8b"), prefix_token_s=0.0, **kernels)
    cost = CostModel(replace(known, **costs))
    prompts = [
        MeasuredStep(tokens, prefix, 0, 0.0, 0.0)
        for tokens in (128, 512, 2048, 8192, 32_768)
        for prefix in (0.0, 8192.0)
    ]
    prefill = [Measured(step.tokens, step.prefix, step.predicted_s(cost)) for step in prompts]
    steps = [
        MeasuredStep(chunk, prefix, batch, 2048.0, 0.0)
        for chunk in (256, 512, 768)
        for prefix in (0.0, 8192.0)
        for batch in (0, 1, 8, 64)
    ]
    steps = [replace(step, seconds=step.predicted_s(cost)) for step in steps]
    found = with_steps(known, prefill, steps)
    assert {name: getattr(found, name) for name in costs} == pytest.approx(costs, rel=1e-4)
    assert found.evidence.steps_left_out_error < 1e-4
    assert found.evidence.prefill_left_out_error < 1e-4
    for point in found.evidence.prefill:
        # in closed form nothing is padded
        assert point.predicted_s == pytest.approx(point.measured_s, rel=1e-3)


def test_a_profile_of_a_log_predicts_as_it_was_fitted(monkeypatch) -> None:
    known = load_profile("h200-llama8b")
    assert known.long_chunk_tokens, "or attention of short chunks would be no other"
    prefill = [
        Measured(tokens, prefix, 0.002 + 2e-5 * tokens + 4e-10 * tokens * (tokens + 2 * prefix))
        for tokens in (100, 400, 700, 900, 1500, 3000)
        for prefix in (0, 1000, 4000, 16_000)
    ]
    decode = [Measured(batch, 2_000, 0.005 + 1e-5 * batch) for batch in range(1, 25)]
    monkeypatch.setattr(profile_log, "prefill_points", lambda served: prefill)
    monkeypatch.setattr(profile_log, "decode_points", lambda served: decode)
    monkeypatch.setattr(profile_log, "_after_prefill_s", lambda request: 0.0)
    run = SimpleNamespace(served=[None], shared=SimpleNamespace(profile=known))
    for point in profile_log.profile_from_run(run, "fitted").evidence.prefill:
        assert point.predicted_s == pytest.approx(point.measured_s, rel=1e-6)


def test_stages_share_the_attention_of_short_chunks_as_all_else() -> None:
    known = load_profile("h200-llama8b")
    one, four = CostModel(known), CostModel(grouped(known, 4))
    for tokens, prefix in ((200, 30_000), (960, 24_576), (8192, 0)):
        assert four.prefill_s(tokens, prefix) == pytest.approx(one.prefill_s(tokens, prefix) / 4, rel=0.01)


def test_one_token_after_a_long_prefix_is_attended_as_one_that_decodes() -> None:
    known = replace(load_profile("h200-llama8b"), prefix_token_s=0.0)
    cost = CostModel(known)
    assert cost.prefill_s(1, 99_999) < 1.5 * cost.decode_step_s(1, 100_000)


def test_a_kernel_that_is_slow_at_some_lengths_makes_long_prompts_no_slower() -> None:
    known = load_profile("h200-llama8b")
    cost = CostModel(known)
    prefill = [
        Measured(tokens, prefix, MeasuredStep(tokens, prefix, 0, 0.0, 0.0).predicted_s(cost))
        for tokens in (128, 512, 1024, 2048, 4096, 8192, 32_768)
        for prefix in (0.0, 8192.0, 24_576.0)
    ]
    steps = [
        MeasuredStep(chunk, prefix, batch, 2048.0, 0.0)
        for chunk in (256, 512, 768)
        for prefix in (0.0, 8192.0)
        for batch in (0, 8)
    ]
    steps = [replace(step, seconds=step.predicted_s(cost)) for step in steps]
    prefill = [
        replace(item, seconds=1.4 * item.seconds) if item.tokens == 1024 and item.context else item
        for item in prefill
    ]
    found = CostModel(with_steps(known, prefill, steps))
    whole = MeasuredStep(8192, 0.0, 0, 0.0, 0.0)
    assert whole.predicted_s(found) == pytest.approx(whole.predicted_s(cost), rel=0.01)


def test_the_shapes_that_can_be_asked_for_are_those_that_there_are():
    assert sorted(engine_shapes.SHAPES) == list(SHAPES)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--timelines", "folder"], "--timelines: of the nodes of a decision log"),
        (["--from-log", "none.jsonl"], "none.jsonl: [Errno 2]"),
        (["--out", "missing/p.json"], "--out missing/p.json: no file can be written there"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_measured(capsys, arguments, reason) -> None:
    assert main(arguments) == 1
    assert f"conductor profile: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--max-batch", "--link-bytes-per-s", "--start-s", "--host-kv-tokens"])
def test_a_number_that_none_can_be_is_refused_with_its_option(capsys, option) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args([f"{option}=-1"])
    assert f"argument {option}: a " in capsys.readouterr().err
