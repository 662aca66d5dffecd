"""Fuzz one target, or each for the same time.

    python -m tests.fuzz [TARGET...] [--seconds 60] [--seed 0] [--atheris]

With `--atheris` (a package of that name; one target a run) inputs are chosen by what code they
reach; otherwise by chance. A finding ends the run and is printed whole: put it into
`tests/fuzz/corpus/TARGET/`, from where every run of the tests reads it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.targets import Target

SLOW_S = 1.0
"""Of processor time, for one input."""


def tried_soon(name: str, target: Target, data: bytes) -> None:
    """Let the target read `data`; raises FoundError, also for an input that takes longer than `SLOW_S`."""
    from tests.fuzz.mutations import FoundError, tried  # noqa: PLC0415

    begin_s = time.process_time()
    tried(name, target, data)
    took_s = time.process_time() - begin_s
    if took_s > SLOW_S:
        raise FoundError(f"{name}: {took_s:.1f} s; input {data!r}")


def by_chance(names: list[str], seconds: float, seed: int) -> None:
    from tests.fuzz.mutations import corpus, mutated  # noqa: PLC0415
    from tests.fuzz.targets import TARGETS  # noqa: PLC0415

    for name in names or TARGETS:
        target, rng, count = TARGETS[name], random.Random(seed), 0
        inputs = corpus(name, target)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            tried_soon(name, target, mutated(rng, inputs, target.words))
            count += 1
        print(f"{name}: {count} inputs, nothing found", flush=True)


def by_coverage(name: str, seconds: float) -> None:
    import atheris  # noqa: PLC0415

    with atheris.instrument_imports(include=["base", "conductor", "kvstore", "transfer", "deploy"]):
        from tests.fuzz.mutations import corpus  # noqa: PLC0415
        from tests.fuzz.targets import TARGETS  # noqa: PLC0415
    target = TARGETS[name]
    seeds = Path(tempfile.mkdtemp(prefix="fuzz-"))
    for number, data in enumerate(corpus(name, target)):
        (seeds / str(number)).write_bytes(data)
    options = [f"-max_total_time={seconds:.0f}", "-max_len=65536", f"-artifact_prefix={seeds}/found-"]
    atheris.Setup([sys.argv[0], str(seeds), *options], lambda data: tried_soon(name, target, data))
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true")
    arguments = parser.parse_args()
    if arguments.atheris:
        by_coverage(arguments.targets[0], arguments.seconds)
    else:
        by_chance(arguments.targets, arguments.seconds, arguments.seed)


if __name__ == "__main__":
    main()
