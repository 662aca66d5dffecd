"""What all tests share."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Helpers beside the tests are imported as tests.*, from wherever pytest is started.
sys.path.insert(0, str(Path(__file__).parent.parent))

# A test that takes long is bounded by pytest-timeout; one example says little on a busy machine.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

# Where there is no GPU, Triton's kernels run in its interpreter. The choice is made when a
# kernel is decorated, so it must stand before the first import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep together, on one of xdist's workers, the tests that share a model or a cluster."""
    for item in items:
        file = item.path.relative_to(Path(__file__).parent)
        shared = "cluster" if file.parts[0] in ("cluster", "faults") else file.as_posix()
        if file.parts[0] == "simulation":
            shared = item.nodeid  # its parts share nothing, and are long
        item.add_marker(pytest.mark.xdist_group(shared))
