"""Kernels that the interpreter runs are also compiled for a GPU."""

import os
import subprocess
import sys


def test_products_by_few_bits_and_the_order_of_experts_compile_for_a_gpu() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.engine.kernels.compile_products"]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
