"""The GPU's way through a model, in Triton's interpreter: same logits as the family itself."""

import copy
import weakref
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine import compiled as compiled_layers
from engine import gpu_model
from engine.fused_projections import use_products
from engine.gpu_attention import step_header
from engine.gpu_model import GpuModel
from engine.kernels import paged_decode
from engine.kernels.decode_parts import decode_parts
from engine.long_chunks import LongChunk
from engine.model import PagedModel
from engine.paged_cache import PagedCache
from engine.prefix_groups import PrefixGroups
from engine.scaled_kv import scaled_layout
from engine.sequence import Sequence
from engine.shared_product import Slice
from engine.step import StepEntry, StepPlan
from engine.step_memory import StepShape, StepWriter, carve
from tests.engine.builders import make_sequence
from tests.engine.test_families import FAMILIES, SMALL

BLOCK_SIZE = 16
NO_TOKENS = torch.zeros(64, dtype=torch.int64)


def make_family(name: str, **changed) -> PreTrainedModel:
    torch.manual_seed(0)
    fields = {"model_type": name, **SMALL, **FAMILIES[name], **changed}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def make_cache(model: PreTrainedModel, num_blocks: int = 32, is_scaled: bool = False) -> PagedCache:
    layout = replace(PagedModel(model).shape, block_size=BLOCK_SIZE)
    return PagedCache(scaled_layout(layout) if is_scaled else layout, num_blocks, torch.device("cpu"))


def make_gpu_model(model: PreTrainedModel, num_blocks: int = 32, layer_groups: int = 1) -> GpuModel:
    return GpuModel(model, make_cache(model, num_blocks), False, layer_groups)


def entry(sequence: Sequence, start: int, count: int, first_block: int) -> StepEntry:
    table = tuple(range(first_block, first_block + 8))[::-1]
    samples = start + count == sequence.num_tokens
    return StepEntry(sequence, start, count, table, samples)


def run(
    model: GpuModel,
    entries: list[StepEntry],
    shape: StepShape,
    rows_of: dict[Sequence, int] | None = None,
    last_tokens: torch.Tensor = NO_TOKENS,
    chunks: tuple[LongChunk, ...] = (),
) -> torch.Tensor:
    singles = sum(item.num_tokens == 1 for item in entries)
    plan = StepPlan(tuple(entries), singles)
    memory = StepWriter(4096, BLOCK_SIZE, pinned=False).write(plan, shape, rows_of or {})
    return model.forward(memory, shape, step_header(shape, chunks, singles), last_tokens)


def expected_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]


def last_state(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.tensor([token_ids], device=model.device)
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, -1]


@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss",
        "deepseek_v3",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in (
                *("llama", "gemma2", "qwen3_moe", "deepseek_v2", "mixtral"),
                *("qwen3", "mistral", "phi", "gpt2"),
            )
        ),
    ],
)
def test_chunks_singles_and_padding_in_one_step_give_the_logits_of_the_family(family: str) -> None:
    reference = make_family(family)
    model = make_gpu_model(copy.deepcopy(reference))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 211, (size,), generator=generator).tolist() for size in (40, 30, 33)]
    first, second, third = (make_sequence(str(index), prompt) for index, prompt in enumerate(prompts))
    prefilled = [entry(first, 0, 39, 0), entry(second, 0, 11, 8), entry(third, 0, 32, 16)]
    run(model, prefilled, StepShape(96, 0, 3, 8))
    last = [entry(first, 39, 1, 0), entry(third, 32, 1, 16), entry(second, 11, 19, 8)]
    logits = run(model, last, StepShape(32, 4, 2, 8))
    for row, prompt in ((0, prompts[0]), (1, prompts[2]), (4, prompts[1])):
        torch.testing.assert_close(logits[row], expected_logits(reference, prompt), rtol=1e-3, atol=1e-4)
        state = last_state(reference, prompt)
        torch.testing.assert_close(model.row_states[row], state, rtol=1e-3, atol=1e-4)


def test_a_layer_whose_window_is_not_the_models_cuts_contexts_for_itself(monkeypatch) -> None:
    monkeypatch.setattr(gpu_model, "windows_of", lambda config: (0,))
    reference = make_family("gpt_oss")
    assert "sliding_attention" in reference.config.layer_types
    model = make_gpu_model(copy.deepcopy(reference))
    prompt = torch.randint(0, 211, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    sequence = make_sequence("a", prompt)
    run(model, [entry(sequence, 0, 39, 0)], StepShape(64, 0, 1, 8))
    logits = run(model, [entry(sequence, 39, 1, 0)], StepShape(8, 4, 0, 8))
    torch.testing.assert_close(logits[0], expected_logits(reference, prompt), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_compiled_layers_share_the_parts_of_a_step(family: str, monkeypatch) -> None:
    model = make_family(family)
    traced = partial(torch.compile, backend="eager", dynamic=True, fullgraph=True)
    monkeypatch.setattr(compiled_layers, "compiled", traced)
    compiled_layers.compile_layers(model.model.layers)
    gpu = make_gpu_model(model)
    sequence = make_sequence("a", [3] * 40)
    run(gpu, [entry(sequence, 0, 39, 0)], StepShape(64, 0, 1, 8))
    cut_alone = Mock(wraps=decode_parts)
    monkeypatch.setattr(paged_decode, "decode_parts", cut_alone)
    run(gpu, [entry(sequence, 39, 1, 0)], StepShape(8, 4, 0, 8))
    assert not cut_alone.called


@pytest.mark.parametrize(
    ("family", "is_scaled"),
    [("llama", False), ("llama", True), ("gpt_oss", False), ("deepseek_v2", False)],
)
def test_sequences_that_begin_alike_are_attended_together(family: str, is_scaled: bool) -> None:
    model = make_family(family)
    together = GpuModel(model, make_cache(model, is_scaled=is_scaled), False)
    generator = torch.Generator().manual_seed(1)
    begin = torch.randint(0, 211, (64,), generator=generator).tolist()
    prompts = [begin + torch.randint(0, 211, (size,), generator=generator).tolist() for size in (5, 30, 17)]
    sequences = [make_sequence(str(index), prompt) for index, prompt in enumerate(prompts)]
    tables = [(9, 8, 7, 6, *range(10 + 4 * index, 14 + 4 * index)) for index in range(3)]
    for sequence, table in zip(sequences, tables, strict=True):
        chunk = StepEntry(sequence, 0, sequence.num_tokens - 1, table, False)
        run(together, [chunk], StepShape(128, 0, 1, 8))
    entries = [
        StepEntry(sequence, sequence.num_tokens - 1, 1, table, True)
        for sequence, table in zip(sequences, tables, strict=True)
    ]
    shape = StepShape(8, 4, 0, 8)
    groups = PrefixGroups(BLOCK_SIZE, together.most_members, least_shared=32)
    plan, header = StepPlan(tuple(entries), 3), step_header(shape)
    memory = StepWriter(4096, BLOCK_SIZE, False, groups).write(plan, shape, {})
    assert carve(memory, shape).single_groups[0, :3].tolist() == [64 * (family != "deepseek_v2")] * 3
    logits = together.forward(memory, shape, header, NO_TOKENS)
    expected = run(together, entries, shape)
    torch.testing.assert_close(logits[:3], expected[:3], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_a_long_chunk_overwrites_the_padding_behind_sequences_of_one_token(family: str) -> None:
    reference = make_family(family)
    model = make_gpu_model(copy.deepcopy(reference))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 211, (size,), generator=generator).tolist() for size in (40, 30, 33)]
    first, second, third = (make_sequence(str(index), prompt) for index, prompt in enumerate(prompts))
    run(model, [entry(first, 0, 39, 0), entry(second, 0, 11, 8)], StepShape(64, 0, 2, 8))
    last = [entry(first, 39, 1, 0), entry(second, 11, 19, 8), entry(third, 0, 33, 16)]
    logits = run(model, last, StepShape(64, 4, 12, 8), chunks=(LongChunk(19, 11), LongChunk(33, 0)))
    for row, prompt in ((0, prompts[0]), (4, prompts[1]), (5, prompts[2])):
        torch.testing.assert_close(logits[row], expected_logits(reference, prompt), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "is_scaled"),
    [("llama", False), ("llama", True), ("gemma2", False), ("deepseek_v2", False), ("deepseek_v3", False)],
)
def test_a_whole_prompt_as_it_is_captured_gives_its_logits_whatever_lies_in_other_blocks(
    family: str, is_scaled: bool
) -> None:
    reference = make_family(family)
    module = copy.deepcopy(reference)
    cache = make_cache(module, is_scaled=is_scaled)
    model = GpuModel(module, cache, False)
    prompt = torch.randint(0, 211, (41,), generator=torch.Generator().manual_seed(1)).tolist()
    step = [entry(make_sequence("a", prompt), 0, 41, 0)], StepShape(64, 0, 2, 8)
    expected = expected_logits(reference, prompt)
    if is_scaled:
        expected = run(model, *step, chunks=(LongChunk(41, 0),))[0]
    cache.tensor.fill_(255)  # in every dtype, what is no number
    logits = run(model, *step, chunks=(LongChunk(64, 0, is_padded=True),))
    torch.testing.assert_close(logits[0], expected, rtol=1e-3, atol=1e-4)


def test_what_a_window_leaves_in_padding_reaches_no_row_of_a_captured_prompt(monkeypatch) -> None:
    layers = ["sliding_attention", "full_attention", "full_attention"]
    reference = make_family("gemma3_text", num_hidden_layers=3, layer_types=layers)
    prompt = torch.randint(0, 211, (41,), generator=torch.Generator().manual_seed(1)).tolist()
    model = make_gpu_model(copy.deepcopy(reference))
    empty = torch.empty

    def undefined(*shape, **fields) -> torch.Tensor:
        made = empty(*shape, **fields)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", undefined)
    chunks = (LongChunk(64, 0, is_padded=True),)
    logits = run(model, [entry(make_sequence("a", prompt), 0, 41, 0)], StepShape(64, 0, 2, 8), chunks=chunks)
    torch.testing.assert_close(logits[0], expected_logits(reference, prompt), rtol=1e-3, atol=1e-4)


def test_a_prompts_table_has_no_number_of_a_step_of_another_shape() -> None:
    writer = StepWriter(4096, BLOCK_SIZE, pinned=False)
    many = [StepEntry(make_sequence("a", range(40)), 0, 40, (91, 92, 93), True) for _ in range(3)]
    shape, prompt = (
        StepShape(512, 4, 4, 8),
        StepEntry(make_sequence("b", range(64)), 0, 64, (1, 2, 3, 4), True),
    )
    writer.write(StepPlan(tuple(many), 0), StepShape(128, 4, 4, 8), {})
    writer.memory[:].fill_(10**6)  # of steps of any other shape
    views = carve(writer.write(StepPlan((prompt,), 0), shape, {}), shape)
    assert views.chunk_tables[0].tolist() == [1, 2, 3, 4, 0, 0, 0, 0]


def test_a_token_that_only_the_device_knows_is_taken_from_the_row_that_sampled_it() -> None:
    reference = make_family("llama")
    model = make_gpu_model(copy.deepcopy(reference))
    sequence = make_sequence("a", range(20))
    run(model, [entry(sequence, 0, 20, 0)], StepShape(32, 0, 1, 8))
    last_tokens = NO_TOKENS.clone()
    last_tokens[5] = 77
    ahead = StepEntry(sequence, 20, 1, tuple(range(8))[::-1], samples=True)
    logits = run(model, [ahead], StepShape(2, 2, 0, 8), {sequence: 5}, last_tokens)
    expected = expected_logits(reference, [*range(20), 77])
    torch.testing.assert_close(logits[0], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_layers_that_are_watched_compute_what_they_did(family: str) -> None:
    reference = make_family(family)
    model = make_gpu_model(copy.deepcopy(reference), layer_groups=2)
    sequence = make_sequence("a", range(20))
    logits = run(model, [entry(sequence, 0, 20, 0)], StepShape(32, 0, 1, 8))
    torch.testing.assert_close(logits[0], expected_logits(reference, list(range(20))), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma"])
def test_fused_projections_change_no_logit(family: str) -> None:
    model = make_family(family)
    token_ids = list(range(30))
    before = expected_logits(model, token_ids)
    use_products(model)
    slices = [module for module in model.modules() if isinstance(module, Slice)]
    assert len(slices) == 5 * model.config.num_hidden_layers
    torch.testing.assert_close(expected_logits(model, token_ids), before, rtol=1e-5, atol=1e-6)


def test_no_more_than_one_groups_weights_are_there_twice_while_projections_are_fused(monkeypatch) -> None:
    model, fused_before, most_alive, join = make_family("llama"), [], 0, torch.cat

    def joining(tensors):
        nonlocal most_alive
        most_alive = max(most_alive, sum(weight() is not None for weight in fused_before))
        joined = join(tensors)
        fused_before.extend(weakref.ref(tensor.untyped_storage()) for tensor in tensors)
        return joined

    monkeypatch.setattr(torch, "cat", joining)
    use_products(model)
    assert len(fused_before) == 5 * model.config.num_hidden_layers
    assert most_alive <= 3  # q, k and v; a cache that fills the device leaves no place for all of them


def test_a_writer_that_is_used_again_leaves_nothing_of_the_step_before() -> None:
    generator = torch.Generator().manual_seed(0)
    used = StepWriter(4096, BLOCK_SIZE, pinned=False)
    for _ in range(30):
        sizes = torch.randint(
            1, 40, (int(torch.randint(1, 4, (), generator=generator)),), generator=generator
        )
        entries = []
        for size in sorted(sizes.tolist()):
            table = torch.randint(0, 99, (size // BLOCK_SIZE + 1,), generator=generator).tolist()
            entries.append(StepEntry(make_sequence("a", range(size)), 0, size, tuple(table), samples=True))
        plan = StepPlan(tuple(entries), sum(item.num_tokens == 1 for item in entries))
        shape = StepShape(128, 4, 4, 8)
        fresh = StepWriter(4096, BLOCK_SIZE, pinned=False).write(plan, shape, {}).clone()
        written = used.write(plan, shape, {}).clone()
        # what lies beyond a table's last block is never read
        tables = shape.size - 8 * shape.max_blocks
        assert torch.equal(written[:tables], fresh[:tables])
        for row in range(shape.num_rows):
            index = row if row < 4 else row - 4
            part = entries[: plan.num_single] if row < 4 else entries[plan.num_single :]
            if index < len(part):
                start = tables + row * shape.max_blocks
                assert written[start : start + len(part[index].block_table)].tolist() == list(
                    part[index].block_table
                )
