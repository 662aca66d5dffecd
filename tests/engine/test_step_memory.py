"""A step's numbers in one piece of memory, whatever step it held before."""

from __future__ import annotations

import pytest
import torch

from engine.step_memory import StepShape, StepViews, carve, write_padding

SHAPES = [StepShape(64, 0, 2, 4), StepShape(80, 2, 2, 4), StepShape(16, 8, 4, 4)]


@pytest.mark.parametrize("before", SHAPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_padding_keeps_nothing_of_a_step_of_another_shape(before: StepShape, shape: StepShape) -> None:
    memory = torch.full((max(item.size for item in SHAPES),), 7, dtype=torch.int32)
    write_padding(memory, before)

    write_padding(memory, shape)

    for name, view in zip(StepViews._fields, carve(memory, shape), strict=True):
        assert set(view.flatten().tolist()) <= {-1 if name == "slots" else 0}, name


def test_padding_writes_nothing_behind_its_step() -> None:
    memory = torch.full((SHAPES[1].size + 3,), 7, dtype=torch.int32)

    write_padding(memory, SHAPES[1])

    assert memory[SHAPES[1].size :].tolist() == [7, 7, 7]
