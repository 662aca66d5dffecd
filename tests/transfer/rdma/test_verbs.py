"""What only RDMA has: rails that fail, keys that are wrong, memory of GPUs. Needs two RDMA devices."""

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from base.checksum import checksum
from base.clock import SystemClock
from base.config import TransferConfig
from base.errors import TransferFailedError
from tests.transfer.carried import Carried
from tests.transfer.remote_peer import RemotePeer
from transfer.agent import TransferAgent
from transfer.batch import pieces_of
from transfer.owned import segment as segments
from transfer.rdma.verbs import MAX_OUTSTANDING, Ended, Rail, open_rails

pytestmark = pytest.mark.rdma

NUM_BYTES = 8 << 20
BLOCK = 256 << 10
OFFSETS = tuple(range(0, NUM_BYTES, BLOCK))
CONFIG = TransferConfig(transports=("rdma", "tcp"))
# Registers any shared memory as if it were a DMA-BUF, which software NICs do not import: the bindings
# and the NIC do with its offset and its keys what they would for a GPU's memory.
ANY_MEMORY_IS_A_DMA_BUF = """
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
void *ibv_reg_mr_iova(void *domain, void *begin, size_t length, uint64_t address, int access);
void *ibv_reg_dmabuf_mr(void *domain, uint64_t offset, size_t length, uint64_t address, int fd, int access)
{
    char *begin = mmap(NULL, offset + length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return begin == MAP_FAILED ? NULL : ibv_reg_mr_iova(domain, begin + offset, length, address, access);
}
"""


@pytest.fixture(scope="module")
def peer() -> Iterator[RemotePeer]:
    with RemotePeer(("rdma", "tcp")) as started:
        yield started


@pytest.fixture
def carried() -> Carried:
    return Carried()


@pytest.fixture
async def agent(carried: Carried) -> AsyncIterator[TransferAgent]:
    async with TransferAgent("us", 1, CONFIG, SystemClock(), observers=[carried]) as started:
        yield started


async def write_all(agent: TransferAgent, peer: RemotePeer) -> None:
    """Write random blocks and check that they arrived."""
    source = agent.allocate(NUM_BYTES)
    source.memory[:] = os.urandom(NUM_BYTES)
    target = peer.allocate(NUM_BYTES)
    grant = peer.grant(target, OFFSETS, BLOCK)
    await agent.write(peer.descriptor, grant, pieces_of(source, OFFSETS, OFFSETS, BLOCK))
    assert peer.checksum(target, 0, NUM_BYTES) == checksum(source.memory)


async def test_a_rail_that_goes_down_leaves_its_work_to_the_other(
    agent: TransferAgent, peer: RemotePeer, carried: Carried
) -> None:
    await write_all(agent, peer)
    set_link("down")
    try:
        await write_all(agent, peer)
    finally:
        set_link("up")
    assert carried.batches == {"rdma": 2}


async def test_what_no_rail_carries_goes_over_tcp(
    agent: TransferAgent, peer: RemotePeer, carried: Carried
) -> None:
    await write_all(agent, peer)
    with RemotePeer(("tcp",)) as plain:
        await write_all(agent, plain)
    assert carried.batches == {"rdma": 1, "tcp": 1}


async def test_a_revocation_while_our_loop_is_busy_costs_the_next_batch_nothing(
    agent: TransferAgent, peer: RemotePeer, carried: Carried
) -> None:
    target, source = peer.allocate(BLOCK), agent.allocate(BLOCK)
    for _ in range(2):
        grant = peer.grant(target, (0,), BLOCK)
        await agent.write(peer.descriptor, grant, pieces_of(source, [0], [0], BLOCK))
        # Waits for the answer with no turn of our loop, which could let go of nothing meanwhile.
        peer.ask(do="revoke", generation=grant.generation)
    assert carried.batches == {"rdma": 2}


def test_a_wrong_key_is_refused_by_the_nic_and_told_apart_from_a_lost_peer() -> None:
    rails, reason = open_rails()
    assert rails, reason
    rail = rails[0]
    source, target = (segments.allocate_shared(number, BLOCK) for number in (1, 2))
    near, far = rail.queue_pair(), rail.queue_pair()
    near.connect(far.end)
    far.connect(near.end)
    local, _ = rail.keys(source)
    _, remote = rail.keys(target)
    near.post([(1, True, source.address, BLOCK, local, target.address, remote ^ 0xFF00)], is_write=True)
    ended = completions(rail)
    assert [(each.work_id, each.is_refused) for each in ended] == [(1, True)]
    for owned in (near, far, *rails):
        owned.close()


def test_more_work_than_a_queue_holds_is_a_transfer_failure() -> None:
    rails, reason = open_rails()
    assert rails, reason
    rail = rails[0]
    segment = segments.allocate_shared(1, BLOCK)
    near, far = rail.queue_pair(), rail.queue_pair()
    near.connect(far.end)
    far.connect(near.end)
    local, remote = rail.keys(segment)
    one = (True, segment.address, 8, local, segment.address + 8, remote)
    with pytest.raises(TransferFailedError, match=rail.name):
        near.post([(number, *one) for number in range(16 * MAX_OUTSTANDING)], is_write=True)
    for owned in (near, far, *rails):
        owned.close()


def test_memory_that_the_nic_refuses_is_a_transfer_failure_that_says_where_to_look() -> None:
    rails, reason = open_rails()
    assert rails, reason
    unmapped = segments.Segment(1, memoryview(b""), 4096, None, BLOCK)
    with pytest.raises(TransferFailedError, match=r"cannot be registered .* see ulimit -l"):
        rails[0].keys(unmapped)
    for rail in rails:
        rail.close()


def test_memory_of_gpus_goes_by_the_nics_where_the_bindings_can_register_it(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, library = tmp_path / "dma_buf.c", tmp_path / "dma_buf.so"
    source.write_text(ANY_MEMORY_IS_A_DMA_BUF)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, source, "-l:libibverbs.so.1"], check=True, timeout=120
    )
    assert gpus_over_rdma(LD_PRELOAD=str(library)) == {"rdma": 3}


def test_memory_of_gpus_that_no_nic_registers_goes_over_tcp() -> None:
    assert gpus_over_rdma() == {"staged_tcp": 2, "tcp": 1}


def gpus_over_rdma(**environment: str) -> dict[str, int]:
    """Return how many batches each transport carried between two agents with memory of GPUs."""
    command = [sys.executable, "-m", "tests.transfer.rdma.gpus_over_rdma"]
    run = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=120
    )
    carried: dict[str, int] = json.loads(run.stdout)
    return carried


def set_link(state: str) -> None:
    """Set the interface under the second rail up or down."""
    subprocess.run(["ip", "link", "set", "dummy0", state], check=True)


def completions(rail: Rail) -> list[Ended]:
    """Wait for the channel, as the event loop does."""
    select.select([rail.channel_fd], [], [], 10)
    return rail.poll()
