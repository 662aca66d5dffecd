"""Triton kernels, each with its launcher, and one of numba's for CPUs.

`tests/engine/definitions.py` says what they compute.
"""
