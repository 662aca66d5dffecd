"""How long a file that was made to harm its reader occupies a processor before it is refused.

    python -m bench.hostile_files

Traces and cluster.yaml. `tests/test_hostile_files.py` reads the same files, and asserts that each is
refused by name and with little work, in counts: a clock on a shared machine measures its other work too.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from base.errors import ConfigError
from conductor.replay.trace_formats import read_trace
from deploy.config_file import read_cluster_config

ROUNDS = 5
ROW = {"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}


def row(**fields: object) -> bytes:
    """Return a good row of a trace but for `fields`."""
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
ARCHIVES = {"no gzip": b"not gzip", "cut off": gzip.compress(row())[:-9]}
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


def refused_after_s(read: Callable[[Path], object], path: Path, content: bytes) -> float:
    """Return the processor time of the quickest of some refusals; raises what is no refusal."""
    path.write_bytes(content)
    took_s = []
    for _ in range(ROUNDS):
        begin_s = time.process_time()
        try:
            read(path)
        except ConfigError:
            took_s.append(time.process_time() - begin_s)
        else:
            raise AssertionError(f"{path.name} is taken: {content[:80]!r}")
    return min(took_s)


def main() -> None:
    """Print the processor time of each refusal."""
    kinds = (
        (read_trace, "t.jsonl", TRACES),
        (read_trace, "t.jsonl.gz", ARCHIVES),
        (read_cluster_config, "cluster.yaml", CONFIGURATIONS),
    )
    with tempfile.TemporaryDirectory() as folder:
        for read, file_name, contents in kinds:
            for name, content in contents.items():
                took_s = refused_after_s(read, Path(folder) / file_name, content + b"\n")
                print(f"{took_s * 1e3:8.2f} ms  {len(content):9,} bytes  {file_name:12}  {name}")


if __name__ == "__main__":
    main()
