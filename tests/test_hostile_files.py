"""Files made to harm whoever reads them: traces and cluster.yaml. Each is refused soon, by name."""

import gzip
import json
import time

import pytest

from base.errors import ConfigError
from conductor.replay.trace_formats import read_trace
from deploy.config_file import read_cluster_config

SOON_S = 0.05
ROW = {"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}


def row(**fields):
    return json.dumps({**ROW, **fields}).encode()


TRACES = {
    "no UTF-8": b"\xff\xfe\x00",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "time infinite": row(timestamp=float("inf")),
    "time NaN": row(timestamp=float("nan")),
    "ids of 2^64": row(hash_ids=[2**64, 1]),
    "ids that are true": row(hash_ids=[True, 1]),
    "ids of another kind": row(hash_ids={}),
    "a prompt of 10^30": row(input_length=10**30),
    "an answer of -1": row(output_length=-1),
    "NULs": b"\0" * 1000,
    "a string without end": b'"' + b"x" * 1_000_000,
    "a number of 10,000 digits": b"1" * 10_000,
    "blocks of 0": b'{"block_size": 0}\n' + row(),
    "blocks of infinity": b'{"block_size": 1e400}\n' + row(),
}
ALIASES = "\n".join(["a0: &a0 x", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))])
CONFIGURATIONS = {
    "no UTF-8": b"\xff\xfe",
    "deep": b"[" * 100,
    "a list within itself": b"&a [*a]",
    "a table within itself": b"server: &a {tls: *a}",
    "aliases of aliases": ALIASES.encode(),
    "a call": b"model: !!python/object/apply:os.getcwd []",
    "a table for a key": b"? {a: b}\n: 1",
    "a number of 10,000 digits": b"server: {http_port: " + b"9" * 10_000 + b"}",
    "infinity": b"server: {http_port: .inf}",
    "NaN": b"server: {lease_s: .nan}",
    "another version": b"%YAML 9.9\n---\n",
    "two documents": b"model: b\n---\nmodel: d\n",
    "NUL": b"\0",
    "escapes of a terminal": b"model: \x1b[2J",
    "an alias of nothing": b"*nothing",
    "merging what is no table": b"<<: [1]",
}


@pytest.fixture(scope="module", autouse=True)
def _started(tmp_path_factory):
    """The first file of a process builds the schema."""
    path = tmp_path_factory.mktemp("first") / "cluster.yaml"
    path.write_text("")
    read_cluster_config(path)


def check_refused_soon(read, path, content):
    path.write_bytes(content)
    begin_s = time.process_time()
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert time.process_time() - begin_s < SOON_S
    assert path.name in str(caught.value)
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("name", TRACES)
def test_a_hostile_trace_is_refused(tmp_path, name):
    check_refused_soon(read_trace, tmp_path / "t.jsonl", TRACES[name] + b"\n")


@pytest.mark.parametrize("content", [b"not gzip", gzip.compress(row())[:-9]], ids=["no gzip", "cut off"])
def test_a_hostile_archive_is_refused(tmp_path, content):
    check_refused_soon(read_trace, tmp_path / "t.jsonl.gz", content)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_hostile_configuration_is_refused(tmp_path, name):
    check_refused_soon(read_cluster_config, tmp_path / "cluster.yaml", CONFIGURATIONS[name])
