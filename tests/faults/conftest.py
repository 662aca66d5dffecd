"""The faults' tests run on the same clusters as those of tests/cluster."""

from tests.cluster.conftest import smollm2

__all__ = ["smollm2"]
