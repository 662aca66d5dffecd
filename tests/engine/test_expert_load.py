"""Where tokens go is counted once for each of them, on every way through a model, and told by its period."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from base.messages import ExpertLoad
from engine.expert_load import PERIOD_S, READ_S, ExpertBalance, ExpertCounts, expert_counts, load_of
from engine.gpu_model import GpuModel
from engine.model import PagedModel
from engine.paged_cache import PagedCache
from engine.step_memory import StepShape
from tests.engine.builders import greedy, make_loop, make_model, make_sequence
from tests.engine.test_families import FAMILIES, random_model
from tests.engine.test_gpu_model import BLOCK_SIZE, entry, make_family, run
from tests.manual_clock import ManualClock

PROMPTS = [[5], list(range(30, 75)), [199 - 3 * index for index in range(60)]]


def chosen_by(model: PreTrainedModel, texts: list[list[int]]) -> torch.Tensor:
    """Return the choices [layers, experts] of texts that the family reads by itself, one after the other."""
    layers = [module for module in model.modules() if hasattr(module, "gate_up_proj") and module_is(module)]
    counts = torch.zeros(len(layers), len(layers[0].gate_up_proj), dtype=torch.int64)

    def look(index):
        def note(_, inputs):
            counts[index] += torch.bincount(inputs[1].flatten(), minlength=counts.shape[1])

        return note

    handles = [layer.register_forward_pre_hook(look(index)) for index, layer in enumerate(layers)]
    with torch.no_grad():
        for text in texts:
            model(input_ids=torch.tensor([text]), use_cache=False)
    for handle in handles:
        handle.remove()
    return counts


def module_is(module) -> bool:
    return isinstance(module.gate_up_proj, torch.nn.Parameter)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v2", "gpt_oss"])
async def test_each_token_of_each_step_is_counted_once(family: str) -> None:
    model = random_model(family, **FAMILIES[family])
    reference = copy.deepcopy(model)
    loop = make_loop(make_model(model), chunk_tokens=23)
    counts = expert_counts(model)
    counts.count_all()
    answers = await greedy(loop, PROMPTS, 6)
    # The last token of an answer is said and not read.
    texts = [prompt + answer[:-1] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    assert torch.equal(counts.copied(), chosen_by(reference, texts))
    assert len(counts.copied()) == (1 if family.startswith("deepseek") else 2), "dense layers choose nothing"


@pytest.mark.parametrize(
    ("family", "most_pairs"),
    [*(pytest.param("mixtral", most, marks=pytest.mark.full) for most in (16, 4096)), ("gpt_oss", 4096)],
)
def test_padding_is_not_counted(family: str, most_pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain experts are counted by their kernels, those of gpt_oss beside theirs."""
    monkeypatch.setattr("engine.kernels.grouped_experts.MAX_PAIRS", most_pairs)
    reference = make_family(family)
    model = copy.deepcopy(reference)
    layout = replace(PagedModel(model).shape, block_size=BLOCK_SIZE)
    counts = expert_counts(model)
    gpu_model = GpuModel(model, PagedCache(layout, 32, torch.device("cpu")), False, counts=counts)
    gpu_model.take_steps(128)
    prompts = [[(7 * index + size) % 211 for index in range(size)] for size in (40, 33)]
    first, second = (make_sequence(str(index), prompt) for index, prompt in enumerate(prompts))
    run(gpu_model, [entry(first, 0, 39, 0), entry(second, 0, 11, 8)], StepShape(96, 0, 3, 8))
    run(gpu_model, [entry(first, 39, 1, 0), entry(second, 11, 22, 8)], StepShape(32, 4, 2, 8))
    expected = chosen_by(reference, prompts)
    expected[-1] = 0  # the last layer computes what is sampled alone
    assert torch.equal(counts.copied(), expected)
    counts.reset()
    assert not counts.copied().any()


def test_a_model_without_experts_has_no_counters() -> None:
    assert expert_counts(random_model("llama")) is None


def test_loads_are_shares_of_the_mean_layer_by_layer() -> None:
    counts = torch.tensor([[10, 30, 20, 20], [40, 40, 0, 0], [0, 0, 0, 0]])
    assert load_of(counts, 2) == ExpertLoad(
        num_choices=80,
        busiest=(1.5 + 2) / 2,
        busiest_of_a_layer=2.0,
        busiest_rank=(1 + 2) / 2,
        ranks=(120 / 80, 40 / 80),
    )
    assert load_of(counts, 1).ranks == (1.0,)
    assert load_of(torch.zeros(2, 4, dtype=torch.int64), 2) is None


def test_what_was_counted_two_periods_ago_is_forgotten_unless_nothing_came_since() -> None:
    clock = ManualClock()
    model = random_model("mixtral", **FAMILIES["mixtral"])
    counts = expert_counts(model)
    balance = ExpertBalance(counts, clock)
    assert balance.load() is None
    counts.counts[0] += torch.tensor([8, 0, 0, 0])
    assert balance.load() is None, "it was read a moment ago"
    clock.advance(READ_S)
    assert balance.load().busiest == 4
    clock.advance(PERIOD_S)
    assert balance.load().busiest == 4
    for _ in range(3):
        clock.advance(PERIOD_S)
        assert balance.load().busiest == 4, "nothing came"
    counts.counts[0] += torch.tensor([0, 4, 4, 0])
    clock.advance(PERIOD_S)
    assert balance.load() == ExpertLoad(8, 2.0, 2.0, 1.0, (1.0,)), "the first eight are forgotten"


def test_a_copy_is_no_view_of_the_counters() -> None:
    counts = ExpertCounts([torch.nn.Linear(2, 2)], 2, 1)
    before = counts.copied()
    counts.counts += 1
    assert not before.any()
