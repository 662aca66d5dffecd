"""Triton kernels, each with its launcher and its plain-torch definition."""
