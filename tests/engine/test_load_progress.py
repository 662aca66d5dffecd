"""Whoever waits for a large model sees how much of it is ready; a small one says nothing."""

import logging

import pytest
import torch
from torch import nn

from engine.device_weights import move_to
from engine.load_progress import LoadProgress
from engine.packed_linear import pack_linears
from engine.quantized_linear import quantize_linears, use_cpu_products
from engine.quantized_weight import WeightFormat

GIB = 1 << 30


@pytest.fixture(autouse=True)
def hear(caplog) -> None:
    caplog.set_level(logging.INFO, "engine.load_progress")


def some_layers() -> nn.ModuleList:
    """Return eight layers of 4 MiB, two pairs of them of one input."""
    names = ("gate_proj", "up_proj", "down_proj", "o_proj")
    return nn.ModuleList(nn.ModuleDict({name: nn.Linear(1024, 1024) for name in names}) for _ in range(2))


def test_a_line_follows_each_gigabyte_and_the_end(caplog) -> None:
    progress = LoadProgress("weights move", 5 * GIB // 2)
    for _ in range(5):
        progress.add(GIB // 2)
    assert caplog.messages == [f"weights move gigabytes={done} of=2.7" for done in (1.1, 2.1, 2.7)]


@pytest.mark.parametrize(
    ("how", "line", "lines"),
    [("floats", "weights are laid out", 6), ("int8", "levels are laid out", 3), ("moved", "weights move", 6)],
)
def test_each_part_of_loading_tells_its_progress(how, line, lines, monkeypatch, caplog) -> None:
    """Layers of one input are one part; of 8 bits they have a quarter of the bytes."""
    monkeypatch.setattr("engine.load_progress.SHOWN_BYTES", 3 << 20)
    model = some_layers()
    if how == "int8":
        quantize_linears(model, WeightFormat.INT8)
        use_cpu_products(model)
    elif how == "floats":
        pack_linears(model)
    else:
        move_to(model, torch.device("meta"))
    assert [message.partition(" gigabytes")[0] for message in caplog.messages] == [line] * lines


def test_what_is_small_is_not_told(caplog) -> None:
    pack_linears(some_layers())
    assert caplog.messages == []
