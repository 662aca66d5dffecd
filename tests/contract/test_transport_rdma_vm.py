"""The rdma transport on a machine without RDMA: the same suites, in a virtual machine that has it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RUNNER = ROOT.parent / "shared" / "rdma-vm" / "run-in-rdma-vm"
# Every plugin costs a second of import under emulation.
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin"]
PYTEST += ["-p", "pytest_timeout", "-p", "xdist.plugin", "-q", "-x", "-m", "rdma", "--timeout", "240"]


@pytest.mark.full
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("suite", ["tests/transfer/test_rdma.py", "tests/contract/test_transport.py"])
def test_the_rdma_suites_pass_in_a_virtual_machine(suite: str) -> None:
    if not RUNNER.exists():
        pytest.skip(f"no {RUNNER.name}: docs/rdma.md says how to run these on a machine with a NIC")
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [str(RUNNER), "-t", "600", *PYTEST, suite]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
