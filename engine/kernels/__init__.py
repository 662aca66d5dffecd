"""Triton kernels, each with its launcher; `tests/engine/definitions.py` says what they compute."""
