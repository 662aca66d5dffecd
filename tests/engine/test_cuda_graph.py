"""Captured steps: which step takes which graph, and what a whole prompt reports on its way."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from engine.arrivals import PrefixArrivals
from engine.cuda_graph import (
    CAPTURED_LATENTS,
    GRAPH_CHUNKS,
    PROMPT_CHUNKS,
    StepGraphs,
    prompt_ladder,
)
from engine.kernels.expanded_latents import TILE, capacity_of
from engine.layer_hooks import LayerHooks
from engine.long_chunks import LongChunk
from engine.step import StepEntry, StepPlan
from engine.step_memory import StepShape
from tests.engine.builders import make_sequence
from tests.manual_clock import ManualClock


def plan(num_single: int, *chunks: tuple[int, int]) -> StepPlan:
    """Return a step of single tokens and of chunks (start, tokens)."""
    entries = [StepEntry(make_sequence("s", [1] * 9), 8, 1, (0,), True) for _ in range(num_single)]
    entries += [
        StepEntry(make_sequence("c", [1] * (start + count)), start, count, (0,), True)
        for start, count in chunks
    ]
    return StepPlan(tuple(entries), num_single)


def make_graphs(run=None, hooks=None, max_prompt: int = 8192) -> StepGraphs:
    return StepGraphs(run, hooks or LayerHooks(nn.ModuleList(), 1), 64, 8, 8192, max_prompt)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (plan(5), StepShape(8, 8, 0, 8)),
        (plan(3, (0, 100)), StepShape(128, 64, GRAPH_CHUNKS, 8)),
        (plan(0, (0, 2047)), StepShape(2048, 64, GRAPH_CHUNKS, 8)),
        (plan(0, (0, 2048)), StepShape(2048, 0, PROMPT_CHUNKS, 8)),
        (plan(0, (0, 2049)), StepShape(2560, 0, PROMPT_CHUNKS, 8)),
        (plan(0, (0, 4096)), StepShape(4096, 0, PROMPT_CHUNKS, 8)),
        (plan(0, (0, 4097)), None),
        (plan(0, (4096, 2048)), StepShape(2048, 64, GRAPH_CHUNKS, 8)),
        (plan(2, (16, 2048), (4096, 1000)), StepShape(3072, 64, GRAPH_CHUNKS, 8)),
        (plan(0, (16_384, 1024)), StepShape(1024, 64, GRAPH_CHUNKS, 8)),
        (plan(0, (16_384, 2048)), None),
        (plan(0, (16, 3073)), None),
        (plan(1, (0, 2048)), StepShape(2560, 64, GRAPH_CHUNKS, 8)),
        (plan(1, (0, 2560)), StepShape(3072, 64, GRAPH_CHUNKS, 8)),
        (plan(1, (0, 3072)), None),
        (plan(0, (0, 2048), (0, 2048)), None),
        (plan(0, *[(0, 9)] * (GRAPH_CHUNKS + 1)), None),
    ],
)
def test_a_step_takes_the_smallest_graph_of_its_kind(step: StepPlan, expected: StepShape | None) -> None:
    assert make_graphs().shape_of(step) == expected


@pytest.mark.parametrize(
    ("step", "num_tokens"),
    [
        (plan(0, (24_576, 2048)), 2048),
        (plan(2, (8192, 4000)), 4096),
        (plan(0, (24_576, 1024), (24_576, 1024)), 2048),
        (plan(0, (49_152, 1024), (16, 1024)), 2048),
        (plan(0, (65_536, 1024)), None),
        (plan(0, (16, 4097)), None),
    ],
)
def test_a_long_step_over_latents_is_captured_up_to_what_a_workspace_holds(
    step: StepPlan, num_tokens: int | None
) -> None:
    graphs = StepGraphs(None, LayerHooks(nn.ModuleList(), 1), 64, 8, 8192, 1 << 17, CAPTURED_LATENTS)
    found = graphs.shape_of(step)
    assert (found.num_tokens if found else None) == num_tokens
    tables = torch.zeros(GRAPH_CHUNKS, 1 << 11, dtype=torch.int32, device="meta")
    weight = torch.zeros(32, 256, 512, dtype=torch.bfloat16, device="meta")
    needed = sum(-(-(entry.start + entry.num_tokens) // TILE) * TILE for entry in step.entries)
    assert (needed <= capacity_of(4096, tables, 64, weight)) or num_tokens is None


def test_a_prefix_that_is_still_coming_is_waited_for_layer_by_layer() -> None:
    step = plan(0, (4096, 2048))
    step.entries[0].sequence.arrivals = PrefixArrivals((1, 1), ManualClock(), first_block=3)
    assert make_graphs().shape_of(step) is None


def test_the_ladder_of_whole_prompts_is_no_longer_than_a_chunk_can_be() -> None:
    assert prompt_ladder(2047) == []
    assert prompt_ladder(2048) == [2048]
    assert prompt_ladder(3000) == [2048, 2560, 3072]
    assert prompt_ladder(100_000) == [2048, 2560, 3072, 3584, 4096]


def test_steps_of_many_prompts_are_captured_where_a_prompt_is_short() -> None:
    graphs = make_graphs(max_prompt=512)
    assert graphs.shape_of(plan(0, *[(0, 400)] * 8)) == StepShape(4096, 64, GRAPH_CHUNKS, 8)
    assert graphs.shape_of(plan(0, (0, 2048))) is None


class RecordedGraph:
    """Stands for a CUDA graph: what is done while it is open is done again by `replay`."""

    def __init__(self, done: list[str]) -> None:
        self.work: list[str] = []
        self._done = done

    def replay(self) -> None:
        self._done += self.work


def test_a_whole_prompt_is_captured_in_pieces_and_reports_each_group_before_the_next_is_queued(
    monkeypatch,
) -> None:
    done: list[str] = []
    opened: list[RecordedGraph] = []

    @contextmanager
    def graph(recorded: RecordedGraph, pool: object, capture_error_mode: str):
        assert pool == "pool"
        opened.append(recorded)
        yield
        opened.pop()

    monkeypatch.setattr("engine.cuda_graph.mark_on_stream", lambda: done.append("mark") or done.copy)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: RecordedGraph(done))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    class Layer(nn.Module):
        def forward(self, name: str) -> None:
            if opened:
                opened[-1].work.append(name)

    layers = nn.ModuleList(Layer() for _ in range(5))
    hooks = LayerHooks(layers, 2, lambda: lambda: None)
    ran: list[tuple[StepShape, tuple[LongChunk, ...]]] = []

    def run(shape: StepShape, chunks: tuple[LongChunk, ...]) -> None:
        ran.append((shape, chunks))
        for index, layer in enumerate(layers):
            layer(f"layer {index}")
        if opened:
            opened[-1].work.append("sample")

    graphs = make_graphs(run, hooks)
    graphs.capture()
    assert not opened
    prompt, decode = StepShape(2048, 0, PROMPT_CHUNKS, 8), StepShape(1, 1, 0, 8)
    assert ran.count((prompt, (LongChunk(2048, 0, is_padded=True),))) == 2  # once to warm up
    assert ran.count((decode, ())) == 2

    groups = graphs.replay(prompt)
    layers_done = [f"layer {index}" for index in range(5)]
    assert done == [*layers_done[:2], "mark", *layers_done[2:], "mark", "sample"]
    assert [(group.first, group.count) for group in groups] == [(0, 2), (2, 3)]
    done.clear()
    assert graphs.replay(decode) == ()
    assert done == [*layers_done, "sample"]
