"""The cost model against the figures its presets were fitted to."""

import math
import random
from itertools import pairwise

import pytest

from base.errors import ConfigError
from conductor.placing.cost_model import Corrections, CostModel
from conductor.placing.profile import profile_json
from conductor.profiles.reader import load_profile, preset_names


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(8, 1.002), (16, 2.055), (32, 4.478), (64, 10.586), (128, 27.512)]
)
def test_paper_prefill_without_a_prefix_is_within_two_percent(tokens: int, seconds: float) -> None:
    cost = CostModel(load_profile("a800-llama70b"))
    assert cost.prefill_s(tokens * 1024, 0) == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(8, 0.135), (16, 0.226), (32, 0.407), (64, 0.881), (128, 2.329)]
)
def test_paper_prefill_with_95_percent_cached_is_within_five_percent(tokens: int, seconds: float) -> None:
    cost = CostModel(load_profile("a800-llama70b"))
    new = tokens * 1024 // 20
    prefill_s = cost.prefill_s(new, tokens * 1024 - new)
    assert prefill_s == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(("batch", "ms"), [(1, 4.24), (8, 4.57), (64, 6.93), (256, 15.55)])
def test_h200_decode_step_is_within_three_percent_of_the_engines_bench(batch: int, ms: float) -> None:
    cost = CostModel(load_profile("h200-llama8b"))
    assert cost.decode_step_s(batch, batch * 1088) == pytest.approx(ms / 1e3, rel=0.03)


@pytest.mark.parametrize(("tokens", "ms"), [(4096, 98.8), (16384, 483.7), (32768, 1188.5)])
def test_h200_prefill_is_within_six_percent_of_the_engines_bench(tokens: int, ms: float) -> None:
    cost = CostModel(load_profile("h200-llama8b"))
    assert cost.prefill_s(tokens, 0) == pytest.approx(ms / 1e3, rel=0.06)


def test_every_preset_loads_and_says_where_it_comes_from() -> None:
    assert {"a800-llama70b", "h200-llama8b", "cpu-smollm2"} <= set(preset_names())
    for name in preset_names():
        profile = load_profile(name)
        assert profile.name == name
        assert profile.source


def test_profile_is_read_back_as_it_was_written(tmp_path) -> None:
    profile = load_profile("a800-llama70b")
    file = tmp_path / "mine.json"
    file.write_text(profile_json(profile))
    assert load_profile(str(file)) == profile


def test_unknown_profile_names_the_presets(tmp_path) -> None:
    with pytest.raises(ConfigError, match="h200-llama8b"):
        load_profile("nothing")
    file = tmp_path / "broken.json"
    file.write_text('{"name": "x", "sped": 1}')
    with pytest.raises(ConfigError, match="sped"):
        load_profile(str(file))


def test_hand_off_of_a_long_computation_shows_the_latency_and_one_layers_bytes() -> None:
    cost = CostModel(load_profile("a800-llama70b"))
    whole_s, latency_s = cost.transfer_s(10_000), cost.profile.transfer_fixed_s
    last_s = latency_s + (whole_s - latency_s) / 80
    assert cost.handoff_s(10_000, compute_s=60.0) == pytest.approx(last_s)
    assert cost.handoff_s(10_000, compute_s=0.0) == pytest.approx(whole_s + last_s)


@pytest.mark.parametrize(
    ("new_tokens", "num_tokens", "is_long"),
    [
        (8_192, 8_192, True),
        (2_048, 2_048, True),
        (1_024, 1_024, False),
        (1_024, 9_000, True),
        (256, 9_000, False),
    ],
)
def test_latency_shows_of_what_leaves_when_its_step_has_ended(new_tokens, num_tokens, is_long) -> None:
    cost = CostModel(load_profile("h200-llama8b"))
    whole_s, latency_s = cost.transfer_s(new_tokens), cost.profile.transfer_fixed_s
    expected_s = (whole_s - latency_s) / 32 if is_long else whole_s
    assert cost.leaving_s(new_tokens, new_tokens, num_tokens) == pytest.approx(expected_s)


def test_latency_shows_of_every_hand_off_where_nobody_measured_which_chunks_are_long() -> None:
    cost = CostModel(load_profile("a800-llama70b"))
    for tokens in (256, 10_000):
        assert cost.leaving_s(tokens, tokens, tokens) == cost.tail_s(cost.transfer_s(tokens))


def test_sequences_without_a_place_lengthen_each_ones_tokens_and_no_step() -> None:
    cost = CostModel(load_profile("h200-llama8b"))
    step_s = cost.decode_step_s(256, 256 * 400)
    assert cost.placed_step_s(256, 256 * 400, 256) == cost.gap_s(256, 256 * 400, 256) == step_s
    assert cost.placed_step_s(384, 384 * 400, 256) == pytest.approx(step_s)
    assert cost.gap_s(384, 384 * 400, 256) == pytest.approx(1.5 * step_s)
    assert cost.gap_s(384, 384 * 400, math.inf) == cost.decode_step_s(384, 384 * 400)


def test_correction_converges_to_a_steady_ratio() -> None:
    corrections = Corrections()
    assert corrections.ratio("n", "prefill") == 1.0
    for number in range(100):
        corrections.observe("n", "prefill", 1.0, 3.0 if number % 2 else 2.0)
    assert 2.0 < corrections.ratio("n", "prefill") < 3.0
    corrections.forget("n")
    assert corrections.ratio("n", "prefill") == 1.0


def another_machine_s(profile_s: float) -> float:
    """Twice as fast as the profile with short prompts, and as fast with long ones."""
    return 0.7 * profile_s**1.25


def test_a_cold_start_is_forgotten_in_as_many_measurements_as_it_is_times_too_slow() -> None:
    corrections = Corrections()
    for measured_s in (4.0, 1.0, 1.0, 1.0):
        corrections.observe("n", "prefill", 1.0, measured_s)
    assert corrections.ratio("n", "prefill") == pytest.approx(4.0 ** (1 / 4))


def test_a_ratio_that_goes_with_size_is_learned_as_a_trend() -> None:
    corrections, rng = Corrections(), random.Random(1)
    for _ in range(60):
        profile_s = math.exp(rng.uniform(math.log(0.1), math.log(2.5)))
        measured_s = another_machine_s(profile_s) * rng.uniform(0.95, 1.05)
        corrections.observe("n", "prefill", profile_s, measured_s)
    for profile_s in (0.1, 0.3, 0.8, 2.5):
        assert corrections.of("n").prefill.corrected_s(profile_s) == pytest.approx(
            another_machine_s(profile_s), rel=0.08
        )


def test_what_is_longer_by_the_profile_stays_longer_whatever_was_learned() -> None:
    rng = random.Random(2)
    for _ in range(50):
        corrections = Corrections()
        for _ in range(rng.randrange(1, 40)):
            corrections.observe("n", "prefill", 10 ** rng.uniform(-3, 2), 10 ** rng.uniform(-3, 2))
        sizes = [0.0, *(10 ** (power / 10) for power in range(-40, 30))]
        corrected = [corrections.of("n").prefill.corrected_s(size) for size in sizes]
        assert all(shorter < longer for shorter, longer in pairwise(corrected))


def test_prompts_of_one_size_say_nothing_of_others() -> None:
    corrections, rng = Corrections(), random.Random(3)
    for _ in range(200):
        corrections.observe("n", "prefill", rng.uniform(0.98, 1.02), rng.uniform(1.8, 2.2))
    assert corrections.of("n").prefill.corrected_s(0.05) == pytest.approx(0.1, rel=0.1)
    assert corrections.of("n").prefill.corrected_s(20.0) == pytest.approx(40.0, rel=0.1)


def test_a_run_of_prompts_is_of_their_mean_size() -> None:
    corrections = Corrections()
    corrections.observe("n", "prefill", 8.0, 16.0, count=8)
    known = corrections.of("n").prefill
    assert (known.trend, known.usual_s) == (0.0, 1.0)
    assert corrections.ratio("n", "prefill") == pytest.approx(2.0)


def test_what_was_learned_is_made_again_to_the_bit() -> None:
    corrections, again, rng = Corrections(), Corrections(), random.Random(4)
    for _ in range(30):
        corrections.observe("n", "prefill", 10 ** rng.uniform(-2, 1), 10 ** rng.uniform(-2, 1))
    known = corrections.of("n").prefill
    again.restore("n", "prefill", known.ratio, known.trend, known.usual_s)
    for power in range(-30, 20):
        size = 10 ** (power / 10)
        assert again.of("n").prefill.corrected_s(size) == corrections.of("n").prefill.corrected_s(size)


def test_a_relaxed_correction_comes_back_to_the_profile() -> None:
    corrections = Corrections()
    for size in (0.1, 1.0, 10.0) * 10:
        corrections.observe("n", "prefill", size, another_machine_s(size))
    corrections.relax(0.0)
    assert corrections.of("n").prefill.corrected_s(0.1) == 0.1
    assert corrections.of("n").prefill.corrected_s(10.0) == 10.0


def test_added_seconds_are_learned_and_one_stall_is_not_believed() -> None:
    corrections = Corrections()
    for _ in range(20):
        corrections.observe_added("n", 0.004)
    assert corrections.of("n").added_s == pytest.approx(0.004)
    corrections.observe_added("n", 5.0)
    assert corrections.of("n").added_s < 0.01
    corrections.forget("n")
    assert corrections.of("n").added_s == 0.0


def _doubted() -> Corrections:
    corrections = Corrections()
    for _ in range(50):
        corrections.observe("slow", "prefill", 1.0, 3.0)
        corrections.observe("other", "prefill", 1.0, 1.0)
    corrections.doubt("slow", "other", "prefill")
    return corrections


def test_only_a_prompt_of_usual_length_tries_a_node_whose_slowness_is_doubted() -> None:
    slow = _doubted().of("slow").prefill
    assert slow.corrected_s(1.0) == pytest.approx(3.0**0.5)
    assert slow.corrected_s(1.01) == pytest.approx(3.03)


def test_what_was_doubted_is_believed_again_after_one_measurement_that_agrees() -> None:
    corrections = _doubted()
    corrections.doubt("slow", "other", "prefill")
    assert corrections.ratio("slow", "prefill") == pytest.approx(3.0**0.25)
    corrections.observe("slow", "prefill", 1.0, 3.0)
    assert corrections.ratio("slow", "prefill") == pytest.approx(3.0)


def test_one_measurement_that_agrees_with_the_doubt_counts_for_half() -> None:
    corrections = _doubted()
    corrections.observe("slow", "prefill", 1.0, 1.0)
    assert corrections.ratio("slow", "prefill") == pytest.approx(3.0**0.25)
    assert corrections.of("slow").prefill.corrected_s(2.0) == pytest.approx(2.0 * 3.0**0.25)
