"""The sampler: each parameter does what its name says, and draws depend on (seed, position) alone."""

from collections import Counter

import pytest
import torch

from base.request import SamplingParams, StopParams
from engine.sampler import noise_seed, sample
from engine.sequence import Sequence
from tests.engine.builders import make_sequence

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def draw_many(count: int, logits: torch.Tensor = LOGITS, **sampling) -> Counter[int]:
    """Sample one token for each of `count` seeds."""
    sequences = [
        make_sequence(f"r{seed}", [0], sampling=SamplingParams(seed=seed, **sampling))
        for seed in range(count)
    ]
    return Counter(token.token_id for token in sample(logits.expand(count, -1), sequences))


def choose(logits: torch.Tensor, sequence: Sequence) -> int:
    return sample(logits[None], [sequence])[0].token_id


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert choose(torch.tensor([0.0, 3.0, 1.0, 3.0, 3.0]), make_sequence("a", [0])) == 1


def test_draws_follow_the_distribution() -> None:
    counts = draw_many(20_000)
    for token_id, probability in enumerate(LOGITS.softmax(-1).tolist()):
        assert counts[token_id] / 20_000 == pytest.approx(probability, abs=0.012)


def test_temperature_flattens_the_distribution() -> None:
    counts = draw_many(20_000, temperature=2.0)
    for token_id, probability in enumerate((LOGITS / 2).softmax(-1).tolist()):
        assert counts[token_id] / 20_000 == pytest.approx(probability, abs=0.012)


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 1e-3])
def test_a_temperature_near_zero_takes_the_best(temperature: float) -> None:
    assert set(draw_many(50, 100 * LOGITS, temperature=temperature)) == {0}


def test_top_k_keeps_the_k_most_likely() -> None:
    counts = draw_many(5_000, top_k=2)
    assert set(counts) == {0, 1}
    assert counts[0] / 5_000 == pytest.approx(LOGITS[:2].softmax(-1)[0].item(), abs=0.02)


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    probabilities = LOGITS.softmax(-1)
    assert set(draw_many(5_000, top_p=probabilities[0].item() - 0.01)) == {0}
    assert set(draw_many(5_000, top_p=probabilities[:2].sum().item() - 0.01)) == {0, 1}
    assert set(draw_many(5_000, top_p=probabilities[:2].sum().item() + 0.01)) == {0, 1, 2}


def test_top_p_of_a_flat_distribution_keeps_its_share() -> None:
    logits = torch.linspace(0, -1e-3, 5_000)
    assert max(draw_many(2_000, logits, top_p=0.5)) == pytest.approx(2_500, rel=0.02)


def test_min_p_drops_what_is_far_less_likely_than_the_best() -> None:
    ratio = (LOGITS[2] - LOGITS[0]).exp().item()
    assert set(draw_many(5_000, min_p=ratio - 0.01)) == {0, 1, 2}
    assert set(draw_many(5_000, min_p=ratio + 0.01)) == {0, 1}


@pytest.mark.parametrize("seed", range(5))
def test_a_draw_depends_on_seed_and_position_and_not_on_company(seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(4, 500)
    others = [
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=7, seed=9),
        SamplingParams(min_p=0.1, seed=5),
    ]
    mine = make_sequence("mine", range(10), sampling=SamplingParams(temperature=0.8, seed=seed))
    alone = choose(logits[0], mine)
    company = [make_sequence(f"r{index}", [0], sampling=params) for index, params in enumerate(others)]
    assert sample(logits, [mine, *company])[0].token_id == alone


def test_noise_differs_by_seed_and_by_position() -> None:
    seeds = [noise_seed(seed, position) for seed in range(100) for position in range(100)]
    assert len(set(seeds)) == 10_000
    assert noise_seed(7, 11) == noise_seed(7, 11)


def test_a_draw_from_many_unlikely_tokens_does_not_hang_on_the_last_bits_of_the_logits() -> None:
    torch.manual_seed(0)
    logits = torch.randn(50_000)
    rounded = logits * (1 + 1e-6 * torch.randn(50_000))
    params = [SamplingParams(temperature=1.5, seed=seed) for seed in range(100)]
    drawn = [
        [choose(values, make_sequence("a", range(10), sampling=item)) for item in params]
        for values in (logits, rounded)
    ]
    assert drawn[0] == drawn[1]


def test_repetition_penalty_counts_prompt_and_answer() -> None:
    sequence = make_sequence("a", [0], sampling=SamplingParams(temperature=0.0, repetition_penalty=3.0))
    assert choose(torch.tensor([2.0, 1.0, -1.0]), sequence) == 1
    sequence.token_ids.append(1)
    assert choose(torch.tensor([2.0, 1.9, 0.7]), sequence) == 2
    assert choose(torch.tensor([-1.0, -1.0, -2.0]), sequence) == 2


def test_presence_and_frequency_penalties_count_the_answer_only() -> None:
    logits = torch.tensor([1.0, 0.6, 0.0])
    for params in ({"presence_penalty": 0.5}, {"frequency_penalty": 0.3}):
        sequence = make_sequence("a", [0, 0], sampling=SamplingParams(temperature=0.0, **params))
        assert choose(logits, sequence) == 0
        sequence.token_ids += [0, 0]
        assert choose(logits, sequence) == 1


def test_logit_bias_is_added() -> None:
    sequence = make_sequence(
        "a", [0], sampling=SamplingParams(temperature=0.0, logit_bias=((4, 10.0), (0, -5.0)))
    )
    assert choose(LOGITS, sequence) == 4


def test_no_stop_token_is_sampled_before_min_tokens() -> None:
    stop = StopParams(max_tokens=9, min_tokens=2, stop_token_ids=(0, 1))
    sequence = make_sequence("a", [5], stop=stop)
    chosen = []
    for _ in range(3):
        chosen.append(choose(LOGITS, sequence))
        sequence.token_ids.append(chosen[-1])
    assert chosen == [2, 2, 0]


def test_logprobs_are_the_models_own() -> None:
    params = SamplingParams(temperature=0.0, logit_bias=((5, 100.0),))
    sequence = make_sequence("a", [0], sampling=params, num_logprobs=2)
    silent = make_sequence("b", [0])
    first, second = sample(LOGITS.expand(2, -1), [sequence, silent])
    expected = LOGITS.log_softmax(-1).tolist()
    assert first.token_id == 5
    assert first.logprobs.logprob == pytest.approx(expected[5])
    assert first.logprobs.top == ((0, pytest.approx(expected[0])), (1, pytest.approx(expected[1])))
    assert second.logprobs is None


def test_zero_logprobs_are_the_sampled_tokens_alone() -> None:
    (token,) = sample(LOGITS[None], [make_sequence("a", [0], num_logprobs=0)])
    assert token.logprobs.top == ()


def test_the_logits_are_left_as_they_are() -> None:
    logits = LOGITS[None].clone()
    sample(logits, [make_sequence("a", [0], sampling=SamplingParams(repetition_penalty=2.0, top_k=2))])
    assert torch.equal(logits, LOGITS[None])
