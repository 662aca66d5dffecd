"""The copy kernel against its definition, by Triton's interpreter on host memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# In a process of its own: the interpreter is chosen when the kernel's module is imported.
PROGRAM = """
import random, torch
from transfer.gpu.kernels.copy_ranges import copy_ranges

rng = random.Random(7)
source = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8)
target = torch.zeros(1 << 16, dtype=torch.uint8)
expected = target.clone()
source_base, target_base = source.data_ptr(), target.data_ptr()
assert source_base % 16 == 0 and target_base % 16 == 0
rows, places = [], rng.sample(range(16), 12)
for place in places:
    start, length = 4096 * rng.randrange(15), 16 * rng.randrange(1, 256)
    rows.append([source_base + start, length, target_base + 4096 * place])
    expected[4096 * place : 4096 * place + length] = source[start : start + length]
table = torch.tensor(rows).T.contiguous()
copy_ranges(table, len(rows), max(row[1] for row in rows), tile_words=64)
assert torch.equal(target, expected)
"""


def test_scattered_ranges_arrive_in_place_and_nothing_else_changes() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
