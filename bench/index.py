"""The prefix index alone: one longest-prefix match over all nodes, and block events.

    python -m bench.index [trace.jsonl] [--json out.json]

The prompts of the conversation trace (24 blocks in the mean, all beginning with the same
block) are held by 8 and by 500 nodes in turn, and every node holds the first block. Then
each prompt is matched. Seconds are the thread's own on the processor; the two sizes take
turns, because the machine's speed drifts.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from bench.about_run import about_run, write_result
from bench.hit_rate import OPEN_TRACE, prompts_of
from bench.place import measure_index
from kvstore.index import PrefixIndex

SIZES = (8, 500)
ROUNDS = 5


def filled(chains: Sequence[Sequence[int]], nodes: int) -> PrefixIndex:
    """Return an index in which each chain has one holder, and the first block all of them."""
    index = PrefixIndex()
    for number, chain in enumerate(chains):
        index.store(number % nodes, chain)
    for node in range(nodes):
        index.store(node, chains[0][:1])
    return index


def micros_of_matches(index: PrefixIndex, chains: Sequence[Sequence[int]]) -> list[float]:
    """Return the microseconds of each match, sorted."""
    micros = []
    for chain in chains:
        started_s = time.thread_time()
        index.match(chain)
        micros.append((time.thread_time() - started_s) * 1e6)
    return sorted(micros)


def main() -> None:
    """Print one line for each size, the growth between them and the events a second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, default=OPEN_TRACE)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chains = [chain for _, chain in prompts_of(options.trace)]
    indexes = {nodes: filled(chains, nodes) for nodes in SIZES}
    random.Random(1).shuffle(chains)
    means: dict[int, list[float]] = {nodes: [] for nodes in SIZES}
    tails: dict[int, list[float]] = {nodes: [] for nodes in SIZES}
    events = []
    gc.disable()
    for _ in range(ROUNDS):
        for nodes, index in indexes.items():
            micros = micros_of_matches(index, chains)
            means[nodes].append(mean(micros))
            tails[nodes].append(micros[int(len(micros) * 0.99)])
        events.append(measure_index(SIZES[-1]))
    result = {
        "about": about_run(),
        "blocks_of_a_prompt": mean(map(len, chains)),
        "match_us": {
            str(nodes): {"mean": median(means[nodes]), "p99": median(tails[nodes])} for nodes in SIZES
        },
        "growth": median(big / small for small, big in zip(*means.values(), strict=True)),
        "events_per_s": median(events),
    }
    print(json.dumps(result, indent=1))
    write_result(options.json, result)


if __name__ == "__main__":
    main()
