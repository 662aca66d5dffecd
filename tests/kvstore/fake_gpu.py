"""A GPU's memory without a GPU: no view of it, and one transport that reaches it.

Stands where `transfer/gpu/transport.py` does: one side is memory of the device, the other is
host memory that a process shows on its board.
"""

from base.grants import Operation
from tests.transfer.gpu.fake_device import device_memory
from transfer.shm.mapped import MappedPeers


class FakeGpu:
    """Wraps an agent's shm transport; `segment` registers memory that it alone reaches."""

    def __init__(self, num_bytes):
        self.memory = bytearray(num_bytes)
        self.num_moved = 0

    def segment(self, agent):
        return agent.register_device(device_memory(self.memory))

    def wrap(self, transport):
        return _Transport(transport, self) if transport.name == "shm" else transport


class _Transport:
    def __init__(self, inner, gpu):
        self._inner = inner
        self._gpu = gpu
        self._peers = MappedPeers()
        self.name = inner.name

    def refusal_or_none(self, peer, segment_id, device):
        if device is None:
            return self._inner.refusal_or_none(peer, segment_id, device)
        return None if self._peers.mapped(peer).board.shows(segment_id, on_device=False) else "no host memory"

    async def move(self, peer, grant, pieces, priority):
        if pieces.segment.device is None:
            await self._inner.move(peer, grant, pieces, priority)
            return
        board = self._peers.mapped(peer).board
        with board.held(grant):
            host = board.memory_of(grant.segment_id)
            for ours, theirs, length in pieces.rows():
                there, here = slice(theirs, theirs + length), slice(ours, ours + length)
                if grant.operation is Operation.WRITE:
                    host[there] = self._gpu.memory[here]
                else:
                    self._gpu.memory[here] = host[there]
            self._gpu.num_moved += pieces.num_bytes

    async def close(self):
        await self._inner.close()
        self._peers.close()
