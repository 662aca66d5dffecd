"""A node whose pace is its own, whoever has the processor: `python -m bench.paced_node --config FILE`.

`python -m node.process`, whose steps last `TIMES` as long as the processor worked on them: the device thread
sleeps for the rest. So nodes that share a busy machine with others keep their pace, as long as each gets a
quarter of a core; and one can be slower than another (bench/slowed_node.py).
"""

from __future__ import annotations

import sys
import time
from unittest.mock import patch

import node.process
from engine.cpu_runner import Runner
from engine.step import StepPlan, StepResult

TIMES = 4.0


def run_at(times: float) -> int:
    """Run the node, each of whose steps lasts so many times its processor seconds."""
    execute = Runner.execute

    def paced(runner: Runner, plan: StepPlan) -> StepResult:
        began_s, worked_s = time.perf_counter(), time.thread_time()
        result = execute(runner, plan)
        lasts_s = times * (time.thread_time() - worked_s)
        time.sleep(max(0.0, began_s + lasts_s - time.perf_counter()))
        return result

    with patch.object(Runner, "execute", paced):
        return node.process.main()


if __name__ == "__main__":
    sys.exit(run_at(TIMES))
