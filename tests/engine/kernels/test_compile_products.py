"""Kernels that the interpreter runs are also compiled for a GPU."""

import os
import subprocess
import sys

import pytest


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("options", [[], pytest.param(["--whole"], marks=pytest.mark.full)])
def test_kernels_that_tests_interpret_compile_for_a_gpu(options: list[str]) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.engine.kernels.compile_products", *options]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
