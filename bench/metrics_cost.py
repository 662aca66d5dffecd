"""What metrics cost: a scrape, and the share of a decode step that counting takes.

    python -m bench.metrics_cost

The node's account is fed by the very function that feeds it live, with an engine that only says
what a step was. The conductor's is what it does for each token of a step. No network: a scrape
over HTTP is these seconds and one answer of so many bytes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from base.messages import PrefillTimes
from base.metrics import ConductorMetrics, NodeMetrics, StoreMetrics, exposition, process_registry
from node.metrics import observe

SEQUENCES = 1000
BATCH = 64
REPEATS = 200


def main() -> None:
    conductor_registry, node_registry = process_registry(), process_registry()
    conductor, node = ConductorMetrics(conductor_registry, "m"), NodeMetrics(node_registry)
    StoreMetrics(node_registry)
    on_step = _node_account(node)
    entries = [SimpleNamespace(num_tokens=1, samples=1, start=9, sequence=None)] * BATCH
    conductor.corrections.values = lambda: {(f"node-{number}", "decode"): 1.0 for number in range(16)}
    for _ in range(SEQUENCES):
        conductor.running.inc()
        conductor.first_token(0.2, PrefillTimes(queue_s=0.05, compute_s=0.1, exposed_transfer_s=0.01))

    def conductor_step() -> None:
        for _ in range(BATCH):
            conductor.next_tokens(0.01, 1)
            conductor.generation_tokens.inc(1)

    print(
        json.dumps(
            {
                "requests in flight": SEQUENCES,
                "scrape of the conductor, ms, median": 1e3
                * _median_s(lambda: exposition(conductor_registry)),
                "scrape of the conductor, bytes": len(exposition(conductor_registry)),
                "scrape of a node, ms, median": 1e3 * _median_s(lambda: exposition(node_registry)),
                "node, a decode step of 64, us, median": 1e6
                * _median_s(lambda: on_step(SimpleNamespace(entries=entries), 0.01, 1.0)),
                "conductor, 64 tokens, us, median": 1e6 * _median_s(conductor_step),
            },
            indent=1,
        )
    )


def _node_account(node: NodeMetrics) -> Callable[[Any, float, float], None]:
    """Return what a node's engine calls after each step."""
    taken: list[Callable[[Any, float, float], None]] = []
    pool = SimpleNamespace(num_held=1, num_available=2, num_cached=1)
    engine = SimpleNamespace(
        pool=pool,
        scheduler=SimpleNamespace(num_preemptions=0, num_swaps=0),
        loop=SimpleNamespace(on_step=taken.append),
    )
    observe(node, cast(Any, engine))
    return taken[0]


def _median_s(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        started_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
