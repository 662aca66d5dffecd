"""What is counted as a bench's own work."""

import os
import subprocess
import sys

from bench.others import own_s, worked_s

BURN = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"


def test_work_of_children_and_of_their_children_is_ones_own() -> None:
    before_s, all_before_s = own_s(os.getpid()), worked_s()
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}], check=True)"
    subprocess.run([sys.executable, "-c", nested], check=True)
    own = own_s(os.getpid()) - before_s
    assert own > 0.25
    # ticks of 10 ms, of several processes
    assert worked_s() - all_before_s > own - 0.1


def test_work_of_a_process_that_is_no_child_is_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        before_s = own_s(child.pid)
        subprocess.run([sys.executable, "-c", BURN], check=True)
        assert own_s(child.pid) - before_s < 0.25
        child.communicate(b"\n")
