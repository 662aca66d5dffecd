"""Where there is no GPU, Triton's kernels run in its interpreter.

The choice is made when a kernel is decorated, so it must stand before the first import.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
