"""Memory of GPUs over tcp: what `test_staged.py` shows of a stand-in, on real ones. Two, if there are."""

import pytest

from base.clock import SystemClock
from base.config import TransferConfig
from base.grants import Operation
from tests.transfer.carried import Carried
from transfer.agent import TransferAgent
from transfer.batch import pieces_of

torch = pytest.importorskip("torch")
cuda_ipc = pytest.importorskip("transfer.gpu.transport", reason="needs Triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

NUM_BYTES = 64 << 20


@pytest.mark.parametrize("block", [16 << 10, 256 << 10, 1 << 20])
async def test_scattered_blocks_travel_between_gpus_over_tcp(block):
    config, generator = TransferConfig(transports=("tcp",)), torch.Generator().manual_seed(block)
    carried = Carried()
    async with (
        TransferAgent("us", 1, config, SystemClock(), observers=[carried]) as us,
        TransferAgent("owner", 2, config, SystemClock()) as owner,
    ):
        last = torch.cuda.device_count() - 1
        sent = torch.randint(0, 256, (NUM_BYTES // block, block), dtype=torch.uint8, generator=generator)
        ours, theirs = sent.to("cuda:0"), torch.zeros_like(sent, device=f"cuda:{last}")
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(last)
        here, there = (
            us.register_device(cuda_ipc.described(ours)),
            owner.register_device(cuda_ipc.described(theirs)),
        )
        offsets = [number * block for number in range(len(sent))]
        places = torch.randperm(len(sent), generator=generator)
        targets = (places * block).tolist()
        grant = owner.grant(there, offsets, block, Operation.WRITE, 30.0)
        await us.write(owner.descriptor, grant, pieces_of(here, offsets, targets, block))
        assert torch.equal(theirs.cpu()[places], sent)
        ours.zero_()
        torch.cuda.synchronize(0)
        grant = owner.grant(there, offsets, block, Operation.READ, 30.0)
        await us.read(owner.descriptor, grant, pieces_of(here, offsets, targets, block))
        assert torch.equal(ours.cpu(), sent)
        assert set(carried.batches) == {"staged_tcp"}


async def test_each_thread_that_serves_the_wire_reaches_the_gpu_whatever_it_is_asked_first(monkeypatch):
    monkeypatch.setattr("transfer.tcp.host.num_reactors", lambda connections: 3)
    config, block = TransferConfig(transports=("tcp",), connections=3), 1 << 20
    async with (
        TransferAgent("us", 1, config, SystemClock()) as us,
        TransferAgent("owner", 2, config, SystemClock()) as owner,
    ):
        theirs = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize(0)
        there, ours = owner.register_device(cuda_ipc.described(theirs)), us.allocate(NUM_BYTES)
        offsets = list(range(0, NUM_BYTES, block))
        grant = owner.grant(there, offsets, block, Operation.READ, 30.0)
        await us.read(owner.descriptor, grant, pieces_of(ours, offsets, offsets, block))
        assert ours.memory == theirs.cpu().numpy().data
