"""Run seeds of the simulation.

python -m tests.simulation --seed 17 --trace
python -m tests.simulation --seeds 1000 --jobs 2
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time

from tests.simulation.world import run_seed


def shared_out(first, count, num_jobs):
    """Run seeds in processes of their own, each a share; return whether any failed."""
    begin_s = time.monotonic()
    edges = [first + count * job // num_jobs for job in range(num_jobs + 1)]
    shares = itertools.pairwise(edges)
    command = [sys.executable, "-m", "tests.simulation"]
    running = [
        subprocess.Popen([*command, "--first", str(begin), "--seeds", str(end - begin)])
        for begin, end in shares
    ]
    failed = any([process.wait() for process in running])
    print(f"{count} seeds in {time.monotonic() - begin_s:.1f} s, {num_jobs} at a time", file=sys.stderr)
    return failed


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one")
    parser.add_argument("--seeds", type=int, default=100, help="run so many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--trace", action="store_true", help="print all that happened")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    told = parser.parse_args()
    if told.jobs > 1:
        return shared_out(told.first, told.seeds, told.jobs)
    seeds = [told.seed] if told.seed is not None else range(told.first, told.first + told.seeds)
    begin_s, failed = time.process_time(), []
    for seed in seeds:
        outcome = run_seed(seed)
        if told.trace:
            for line in outcome.lines:
                print(*line)
        if outcome.violation is not None:
            failed.append(seed)
            print(outcome.report)
    seconds = f"{time.process_time() - begin_s:.1f} s of one core"
    print(f"{len(seeds)} seeds, {len(failed)} failed, {seconds}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
