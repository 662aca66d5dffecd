"""Tests that share a model or a cluster stay on one of xdist's workers."""

import pytest


def test_the_tests_of_a_file_are_one_group(request: pytest.FixtureRequest) -> None:
    if not hasattr(request.config, "workerinput"):
        pytest.skip("one process: there are no workers to keep them on")
    assert request.node.nodeid.endswith("@test_groups.py")
