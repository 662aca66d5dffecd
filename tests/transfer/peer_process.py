"""A peer in a process of its own: owns a segment, gives grants, tells what its bytes are.

Run as a module. Reads one command in JSON a line on standard input and answers one line.
A command that waits (a revocation) does not keep the next one from being read.
"""

import asyncio
import json
import os
import signal
import sys

from base.checksum import checksum
from base.clock import SystemClock
from base.config import TransferConfig
from base.grants import Operation
from tests.transfer.gpu.fake_device import device_memory
from transfer.agent import TransferAgent
from transfer.owned.segment import Segment
from transfer.tcp import host


class Peer:
    def __init__(self, agent: TransferAgent, has_gpu: bool) -> None:
        self.agent = agent
        self.has_gpu = has_gpu
        self.segments: dict[int, Segment] = {}
        self.memory: dict[int, memoryview] = {}
        self.grants = {}

    async def answer(self, command: dict) -> dict:
        name = command["do"]
        if name == "describe":
            peer = self.agent.descriptor
            endpoints = [[each.transport, each.address] for each in peer.endpoints]
            about = {"node_id": peer.node_id, "epoch": peer.epoch, "secret": peer.secret.hex()}
            return {**about, "endpoints": endpoints, "pid": os.getpid()}
        if name == "allocate":
            segment, memory = allocated(self.agent, command["num_bytes"], self.has_gpu)
            self.segments[segment.segment_id], self.memory[segment.segment_id] = segment, memory
            return {"segment_id": segment.segment_id}
        if name == "fill":
            memory = self.memory[command["segment_id"]]
            memory[:] = bytes([command["value"]]) * len(memory)
            return {}
        if name == "checksum":
            memory = self.memory[command["segment_id"]]
            return {"checksum": checksum(memory[command["offset"] :][: command["length"]])}
        if name == "grant":
            return self.grant(command)
        if name == "revoke":
            await self.agent.revoke(self.grants[command["generation"]])
            return {}
        if name == "count":
            return {"num_grants": self.agent.num_grants}
        if name == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
            return {}
        raise ValueError(name)

    def grant(self, command: dict) -> dict:
        segment = self.segments[command["segment_id"]]
        operation = Operation[command["operation"]]
        grant = self.agent.grant(
            segment, command["offsets"], command["length"], operation, command["lease_s"]
        )
        self.grants[grant.generation] = grant
        return {"generation": grant.generation}


def allocated(agent: TransferAgent, num_bytes: int, is_gpus: bool) -> tuple[Segment, memoryview]:
    """Return a segment of the host or of what stands for a GPU, and its bytes."""
    if not is_gpus:
        segment = agent.allocate(num_bytes)
        return segment, segment.memory
    memory = bytearray(num_bytes)
    return agent.register_device(device_memory(memory)), memoryview(memory)


async def serve(transports: tuple[str, ...], epoch: int, node_id: str, has_gpu: bool, reactors: int) -> None:
    host.num_reactors = lambda connections: reactors
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with (
        TransferAgent(node_id, epoch, TransferConfig(transports=transports), SystemClock()) as agent,
        asyncio.TaskGroup() as group,
    ):
        peer = Peer(agent, has_gpu)
        while line := await reader.readline():
            group.create_task(reply(peer, json.loads(line)))


async def reply(peer: Peer, command: dict) -> None:
    answer = await peer.answer(command)
    sys.stdout.write(json.dumps({"id": command["id"], **answer}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    transports, epoch, node_id, memory, reactors = sys.argv[1:]
    asyncio.run(serve(tuple(transports.split(",")), int(epoch), node_id, memory == "gpu", int(reactors)))
