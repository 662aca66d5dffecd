"""The rdma transport on a machine without RDMA: the same suites, in a virtual machine that has it."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RUNNER = ROOT.parent / "shared" / "rdma-vm" / "run-in-rdma-vm"
# Every plugin costs a second of import under emulation, and tests/conftest.py imports torch, which
# costs ten and is needed by nothing here.
PYTEST = [sys.executable, "-u", "-X", "faulthandler", "-m", "pytest", "--noconftest"]
PYTEST += [
    "-p",
    "no:cacheprovider",
    "-p",
    "pytest_asyncio.plugin",
    "-p",
    "pytest_timeout",
    "-p",
    "xdist.plugin",
]
PYTEST += ["-v", "-x", "-m", "rdma", "--timeout", "240"]
# A guest starts in 9 s of one processor (an AMD EPYC's) and then prints this.
STARTED = "the guest has started"
START_S, SUITE_S = 150, 600


def in_guest(suite: list[str]) -> list[str]:
    """The command that runs `suite` in a guest, and prints the stacks of one that takes over `SUITE_S`."""
    limited = 'echo "$0"; exec timeout --preserve-status -k 20 -s ABRT "$@"'
    return ["bash", "-c", limited, STARTED, str(SUITE_S), *PYTEST, *suite]


# What kills a peer starts one, which costs as much as all the rest of the contract.
@pytest.mark.long
@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "suite",
    [
        pytest.param(["tests/contract/test_transport.py", "-k", "not killed"], id="contract"),
        pytest.param(["tests/contract/test_transport.py"], marks=pytest.mark.full, id="whole contract"),
        pytest.param(["tests/transfer/rdma/test_verbs.py"], marks=pytest.mark.full, id="verbs"),
    ],
)
def test_the_rdma_suites_pass_in_a_virtual_machine(suite: list[str]) -> None:
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
    limit = str(START_S + SUITE_S + 100)
    run = subprocess.Popen(
        [str(RUNNER), "-t", limit, *in_guest(suite)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert run.stdout is not None
    try:
        if not select.select([run.stdout], [], [], START_S)[0]:
            pytest.skip(f"the virtual machine did not start within {START_S} s")
        output, _ = run.communicate()
    finally:
        if run.returncode is None:
            os.killpg(run.pid, signal.SIGTERM)
            run.communicate()
    # A suite that hangs is ended in the guest, long before the host ends a guest that stands still.
    if run.returncode == 124:
        pytest.skip(f"the virtual machine stood still: its own limit of {SUITE_S} s did not end the suite")
    assert STARTED in output, output[-6000:]
    assert run.returncode == 0, output[-6000:]
