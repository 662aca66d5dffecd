"""What all tests share."""

import os
import sys
from pathlib import Path

import torch

# Helpers beside the tests are imported as tests.*, from wherever pytest is started.
sys.path.insert(0, str(Path(__file__).parent.parent))

# Where there is no GPU, Triton's kernels run in its interpreter. The choice is made when a
# kernel is decorated, so it must stand before the first import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
