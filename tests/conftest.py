"""What all tests share."""

import gc
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from base.lifetime import NEW_OBJECTS

# Helpers beside the tests are imported as tests.*, from wherever pytest is started.
sys.path.insert(0, str(Path(__file__).parent.parent))

# `nohup` and a shell's `&` leave signals ignored, and thus every program that a test starts and ends by one.
# A handler that does nothing ignores them as well, but no program inherits it.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

# Hypothesis's clocks measure other work of the machine too: pytest-timeout bounds what takes long.
# The same examples each time, so that a run says something of what was changed since the last one;
# `pytest --hypothesis-profile explore` draws others.
BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", **BUSY, derandomize=True)
settings.register_profile("explore", **BUSY)
settings.load_profile("same")

# The collector looks at new objects as seldom as in our processes: it goes through a million more each time.
gc.set_threshold(NEW_OBJECTS)

# Where there is no GPU, Triton's kernels run in its interpreter. The choice is made when a
# kernel is decorated, so it must stand before the first import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


# Tests run on as many workers as there are cores. Two threads of one wait for each other at each product of a
# small model, longer than they compute, and most of all where the second has no core to itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Look for no garbage among a million objects of modules and tests: each look took a second or two.

    No test unfreezes: that would bring them back for all that come after it in this process.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries complain of what is left when the process ends


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Compute on one thread in each test, after one too that built an engine of more."""
    torch.set_num_threads(1)


def run_kernels_in_turns() -> None:
    """Have Triton's interpreter run one kernel at a time, and prepare each function once in a run.

    It keeps the kernel that it runs in globals of its own and of `triton.language`: those of two threads
    at once, two stages of an engine for example, would run with each other's.

    At each call of a function within a kernel it puts its operations into `triton.language` again, where the
    first call in a run has put them: that took more time than all else. And it computes whether integers
    overflow, which it looks at in debugging alone. And it makes a table of types for each that it looks up.
    """
    from triton.runtime import interpreter  # noqa: PLC0415 - after the choice above

    run, patch, turn = interpreter.InterpretedFunction.run, interpreter._patch_lang, threading.RLock()
    look_up, looked_up = interpreter._get_np_dtype, {}
    patched: set[object] = set()

    def run_in_turn(kernel, *arguments, **options):
        with turn:
            patched.clear()
            return run(kernel, *arguments, **options)

    def patch_once(function):
        if function in patched:
            return interpreter._LangPatchScope()
        patched.add(function)
        return patch(function)

    def look_up_once(kind):
        if kind.name not in looked_up:
            looked_up[kind.name] = look_up(kind)
        return looked_up[kind.name]

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter.InterpretedFunction.run = run_in_turn
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = look_up_once


if os.environ.get("TRITON_INTERPRET") == "1":
    run_kernels_in_turns()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Keep together, on one of xdist's workers, the tests that share a model or a cluster.

    The longest groups begin first, so that none trails the run: xdist takes them by how many tests
    they have, and would leave a single test of a minute to the end.
    """
    for item in items:
        file = item.path.relative_to(Path(__file__).parent)
        shared = "cluster" if file.parts[0] in ("cluster", "faults") else file.as_posix()
        if file.parts[0] == "contract":
            # Not each file: with a single long test, xdist hands out the next group, to wait behind it.
            shared = "contract"
        if file.parts[0] == "simulation":
            shared = item.nodeid  # its parts share nothing, and are long
        item.add_marker(pytest.mark.xdist_group(shared))
    yield
    if hasattr(config, "workerinput"):
        sizes = Counter(_group_of(item) for item in items)
        items.sort(key=lambda item: (item.get_closest_marker("long") is None, -sizes[_group_of(item)]))


def _group_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    return str(marker.args[0]) if marker is not None else ""
