"""The node's end of the attach stream: whatever ends it, the node lets go and dials again."""

import asyncio
import random

import pytest

from base.attach import AttachClient
from base.errors import ProtocolError
from base.messages import Lease
from base.wire_membership import lease_to
from tests.conductor.scripted_node import ScriptedWork, node_info
from tests.simulation.attach_stream import Channel, gone
from tests.simulation.loop import SimLoop

ENDED = asyncio.InvalidStateError("RPC already finished.")
"""What grpc.aio raises for a write to a call that has ended; a node that was stopped for longer than its
lease meets it when it goes on."""


class Call:
    """A call that grants a lease, and of which write number `fails_at` raises `error`."""

    def __init__(self, fails_at, error):
        self._fails_at, self._error = fails_at, error
        self._num_writes = 0
        self._answers = [lease_to(Lease(10.0, 2.0, 1))]

    async def write(self, message):
        self._num_writes += 1
        if self._num_writes == self._fails_at:
            raise self._error

    async def read(self):
        if self._answers:
            return self._answers.pop()
        return await asyncio.Event().wait()

    def cancel(self):
        pass


@pytest.mark.parametrize(
    "error", [ENDED, gone("cut"), ProtocolError("x")], ids=lambda error: type(error).__name__
)
@pytest.mark.parametrize("fails_at", [1, 2, 3, 5])
def test_a_write_that_fails_is_the_end_of_the_stream_and_not_of_the_node(fails_at, error):
    loop, work = SimLoop(lambda: (0.0, True)), ScriptedWork()
    calls = []

    def open_stream():
        calls.append(Call(fails_at if not calls else None, error))
        return calls[-1]

    client = AttachClient(node_info(), "there", random.Random(0), dial=lambda: Channel(open_stream))

    async def run():
        task = asyncio.ensure_future(client.run(work))
        await asyncio.sleep(9.0)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    assert len(calls) == 2
    assert work.num_lost == 2  # by the failure, and by the end of the test
