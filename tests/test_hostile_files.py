"""Traces and cluster.yaml made to harm their reader: each is refused by name, with little work."""

import pytest

from base.errors import ConfigError
from bench.hostile_files import ARCHIVES, CONFIGURATIONS, TRACES
from conductor.replay.trace_formats import read_trace
from deploy.config_file import read_cluster_config
from tests.effort import counting

MAX_LINES = 150_000
MAX_LINES_A_BYTE = 100
"""PyYAML is written in Python, and looks at each character."""
MAX_GROWTH = 10
"""Bytes held at once, for each byte of the file."""
SMALL_BYTES = 1 << 20
"""What a reader may hold whatever the file is."""


@pytest.fixture(scope="module", autouse=True)
def _started(tmp_path_factory):
    """Build the schema, as the first file of a process does."""
    path = tmp_path_factory.mktemp("first") / "cluster.yaml"
    path.write_text("")
    read_cluster_config(path)


def check_refused(read, path, content):
    path.write_bytes(content)
    with counting() as effort, pytest.raises(ConfigError) as caught:
        read(path)
    assert effort.lines <= MAX_LINES + MAX_LINES_A_BYTE * len(content)
    assert effort.peak_bytes <= SMALL_BYTES + MAX_GROWTH * len(content)
    assert path.name in str(caught.value)
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("name", TRACES)
def test_a_hostile_trace_is_refused(tmp_path, name):
    check_refused(read_trace, tmp_path / "t.jsonl", TRACES[name] + b"\n")


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_hostile_archive_is_refused(tmp_path, name):
    check_refused(read_trace, tmp_path / "t.jsonl.gz", ARCHIVES[name])


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_hostile_configuration_is_refused(tmp_path, name):
    check_refused(read_cluster_config, tmp_path / "cluster.yaml", CONFIGURATIONS[name])
