"""The store beside a cache that is on a GPU: what `fake_gpu.py` stands for, on a real one."""

import asyncio

import pytest

from base.checksum import sum_of_words
from node.store import pin_pool
from tests.kvstore.cluster import BLOCK_BYTES, bytes_of, chain_of, running_cluster
from tests.kvstore.engine_beside import NUM_BLOCKS, ROOT, Beside, Engine, contents

torch = pytest.importorskip("torch")
cuda_ipc = pytest.importorskip("transfer.gpu.transport", reason="needs Triton")
kernel = pytest.importorskip("engine.kernels.sum_words", reason="needs Triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


class CudaEngine(Engine):
    """Blocks in a tensor of the GPU, summed by the kernel that nodes use."""

    def __init__(self, agent):
        self.tensor = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        super().__init__(agent.register_device(cuda_ipc.described(self.tensor)), bytearray(0))

    def compute(self, path):
        for name in chain_of(path):
            if name not in self.at:
                self.at[name] = len(self.at)
                block = torch.frombuffer(bytearray(bytes_of(name)), dtype=torch.uint8)
                self.tensor[self.at[name]].copy_(block)
        torch.cuda.synchronize()

    def forget(self):
        self.at.clear()
        self.tensor.zero_()
        torch.cuda.synchronize()

    def view(self, block_id):
        return self.tensor[block_id].cpu().numpy().data

    async def checksums(self, block_ids):
        ids = torch.tensor(block_ids, dtype=torch.int32, device="cuda")
        sums = kernel.sum_words(self.tensor.view(torch.int64), ids, 0, BLOCK_BYTES // 8).tolist()
        return [value & (1 << 64) - 1 for value in sums]


async def test_blocks_of_a_gpu_are_saved_loaded_and_found_out_when_damaged(tmp_path):
    limits = {"num_blocks": 8, "folder": tmp_path, "high_watermark": 0.5, "low_watermark": 0.05}
    async with running_cluster() as cluster:
        node = await cluster.node("one", transports=("cuda_ipc", "shm", "tcp"), **limits)
        one = Beside(node, 1e9, engine=CudaEngine(node.agent))
        await pin_pool(node.store, node.agent, one.engine.segment)
        saving = asyncio.ensure_future(one.store.run())
        one.engine.compute("abcdef")
        assert await one.engine.checksums([0]) == [sum_of_words(one.engine.view(0))]
        one.store.offer(chain_of("abcdef"), ROOT)
        await one.saved(6)
        one.engine.forget()
        assert await one.load("abcdef") == contents("abcdef")
        await node.store.tick()
        assert node.store.match(chain_of("abcdef")).num_in_memory == 0
        one.engine.forget()
        assert await one.load("abcdef") == contents("abcdef"), "by way of the disk"
        node.store.segment.memory[node.store.pool.record(chain_of("abc")[2]).block_id * BLOCK_BYTES] ^= 1
        one.engine.forget()
        assert await one.load("abcdef") == contents("ab")
        assert node.store.num_damaged == 1
        saving.cancel()
        await asyncio.wait([saving])
        node.store.check()
