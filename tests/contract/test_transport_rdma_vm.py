"""The rdma transport on a machine without RDMA: the same suites, in a virtual machine that has it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RUNNER = ROOT.parent / "shared" / "rdma-vm" / "run-in-rdma-vm"
# Every plugin costs a second of import under emulation, and tests/conftest.py imports torch, which
# costs ten and is needed by nothing here.
PYTEST = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider"]
PYTEST += ["-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-p", "xdist.plugin"]
PYTEST += ["-q", "-x", "-m", "rdma", "--timeout", "240"]


# The first takes a minute of one processor (65 s of an AMD EPYC's, 2026-11-22), the other half of that.
@pytest.mark.long
@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "suite",
    [
        "tests/contract/test_transport.py",
        pytest.param("tests/transfer/rdma/test_verbs.py", marks=pytest.mark.full),
    ],
)
def test_the_rdma_suites_pass_in_a_virtual_machine(suite: str) -> None:
    if not RUNNER.exists():
        pytest.skip(f"no {RUNNER.name}: docs/how-to/rdma.md says how to run these on a machine with a NIC")
    prepared = subprocess.run([str(RUNNER), "--prepare"], capture_output=True, text=True)
    if prepared.returncode:
        pytest.skip(f"no virtual machine here: {prepared.stderr.strip().splitlines()[-1:]}")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # The guest's processor is a Nehalem that on an AMD host calls itself AMD's. By that name
        # OpenBLAS takes a kernel with instructions that it has not, and numpy dies of one.
        "OPENBLAS_CORETYPE": "Nehalem",
    }
    command = [str(RUNNER), "-t", "600", *PYTEST, suite]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
