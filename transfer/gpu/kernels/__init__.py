"""Triton kernels of the transfer layer."""
