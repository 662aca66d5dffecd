"""Kernels run in Triton's interpreter where there is no GPU.

The choice is made when a kernel is decorated, so it must stand before the first import.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
