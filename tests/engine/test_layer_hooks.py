"""Groups of layers: what is marked, when, and that the model computes what it did before."""

import threading

import pytest
import torch
from torch import nn

from base.clock import SystemClock
from engine.arrivals import PrefixArrivals, prefix_parts
from engine.layer_hooks import LayerHooks


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(index + 1)))
        self.kind = "full"

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return x * self.weight * scale + 1


@torch.no_grad()
def run(layers: nn.ModuleList) -> torch.Tensor:
    x = torch.ones(3)
    for layer in layers[: len(layers)]:
        x = layer(x, scale=0.5)
    return x


@pytest.mark.parametrize(("num_groups", "expected"), [(1, [5]), (2, [2, 3]), (4, [1, 1, 1, 2]), (9, [1] * 5)])
def test_every_layer_is_in_one_group_and_the_result_is_the_same(num_groups: int, expected: list[int]) -> None:
    layers = nn.ModuleList(Layer(index) for index in range(5))
    before = run(layers)
    marks: list[int] = []
    ends = LayerHooks(layers, num_groups, lambda: lambda: marks.append(len(marks)))
    run(layers)  # a step that nobody asked about
    ends.begin()
    assert torch.equal(run(layers), before)
    groups = ends.end()
    assert [group.count for group in groups] == expected
    assert [group.first for group in groups] == [sum(expected[:index]) for index in range(len(expected))]
    assert not marks
    groups[0].wait()
    assert marks == [0]
    assert ends.end() == ()
    assert all(layer.kind == "full" for layer in layers)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 7, 28, 32, 80])
def test_the_parts_of_a_prefix_are_all_layers_and_small_at_both_ends(num_layers: int) -> None:
    parts = prefix_parts(num_layers)
    assert sum(parts) == num_layers
    assert min(parts) >= 1
    assert parts[0] == 1
    assert parts[-1] == 1
    assert max(parts) <= 2 + num_layers // 5


def test_a_layer_waits_for_its_part_of_a_prefix_and_for_no_more() -> None:
    layers = nn.ModuleList(Layer(index) for index in range(4))
    computed: list[int] = []
    second = threading.Event()
    for index, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, index=index: computed.append(index))
    layers[1].register_forward_hook(lambda *_: second.set())
    hooks = LayerHooks(layers, 1, lambda: lambda: None)
    arrivals = PrefixArrivals((2, 2), SystemClock(), 0)
    arrivals.arrived(1)
    hooks.begin([arrivals])
    running = threading.Thread(target=run, args=(layers,))
    running.start()
    assert second.wait(60)
    assert running.is_alive()
    assert computed == [0, 1]
    arrivals.end()
    running.join(60)
    assert computed == [0, 1, 2, 3]
    hooks.end()
    run(layers)  # a step that reads no such prefix


def test_wrapped_layers_share_one_compiled_graph() -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return graph

    torch._dynamo.reset()
    layers = nn.ModuleList(Layer(index) for index in range(6))
    before = run(layers)
    for layer in layers:
        layer.compile(backend=count, dynamic=True, fullgraph=True)
    ends = LayerHooks(layers, 3, lambda: lambda: None)
    ends.begin()
    assert torch.equal(run(layers), before)
    assert len(ends.end()) == 3
    assert graphs == 1


class Other(Layer):
    """A layer whose code is another's."""


def ran(layers: nn.ModuleList) -> list[int]:
    """Run layers, and return which of them computed."""
    computed: list[int] = []
    handles = [
        layer.layer.register_forward_hook(lambda *_, index=index: computed.append(index))
        for index, layer in enumerate(layers)
    ]
    run(layers)
    for handle in handles:
        handle.remove()
    return computed


def test_a_rehearsal_runs_one_layer_of_each_kind_and_the_last() -> None:
    kinds = [Layer, Layer, Other, Layer, Layer, Layer, Layer, Other, Layer]
    layers = nn.ModuleList(kind(index) for index, kind in enumerate(kinds))
    layers[4].kind = "sliding"
    layers[5].register_buffer("zeros", torch.zeros(1))
    layers[6].sections = (1, (None, "a"))
    for index, layer in enumerate(layers):
        layer.layer_idx = index
        layer.called = lambda: None  # code of its own that a number does not show
        layer.others = (torch.ones(2), layer.called)
    hooks = LayerHooks(layers, 1, lambda: lambda: None)
    with hooks.rehearsing():
        assert ran(layers) == list(range(9)), "nobody knows yet what layers give"
    whole = run(layers)
    with hooks.rehearsing():
        assert ran(layers) == [0, 2, 4, 5, 6, 8]
    assert ran(layers) == list(range(9))
    assert torch.equal(run(layers), whole)


def test_a_layer_that_gives_more_than_hidden_states_is_run_in_a_rehearsal_too() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return x + 1, None

    layers = nn.ModuleList(Pair() for _ in range(4))
    hooks = LayerHooks(layers, 1, lambda: lambda: None)

    def sums() -> torch.Tensor:
        x = torch.zeros(1)
        for layer in layers:
            x = layer(x)[0]
        return x

    assert sums() == 4
    with hooks.rehearsing():
        assert sums() == 4
