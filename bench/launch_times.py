"""What launching steps takes of a processor."""

from __future__ import annotations

import time

from engine.runner import StepRunner
from engine.step import LaunchedStep, StepPlan


class LaunchTimes:
    """Counts what a runner launches from now on, and the seconds that it takes."""

    def __init__(self, runner: StepRunner) -> None:
        self.num_launches = 0
        self.total_s = 0.0
        launch = runner.launch

        def timed(plan: StepPlan) -> LaunchedStep:
            began_s = time.perf_counter()
            launched = launch(plan)
            self.num_launches += 1
            self.total_s += time.perf_counter() - began_s
            return launched

        runner.launch = timed  # type: ignore[method-assign]
