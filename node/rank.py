"""`python -m node.rank`: another rank of a node, with its own share of the KV and its own transfer agent.

Rank 0 (`node/process.py`) starts it, sends it steps, and asks its shard (`transfer/shard.py`). It ends with
rank 0's pipe.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import threading
from functools import partial
from typing import Any

from base.clock import SystemClock
from base.config import NodeProcess
from base.errors import ConfigError
from base.logs import configure
from base.tables import from_table
from engine.arrivals import ArrivingBlocks, prefix_parts
from engine.block_sums import block_sums
from engine.build import build_rank
from engine.rank_group import RankGroup
from engine.ranks import Pipe, PipeFrame, follow_steps, join_ranks
from node.kv import local_shard, node_segment, transfer_config
from node.remote_shard import ShardServer
from transfer.agent import TransferAgent


async def serve(spec: dict[str, Any], group: RankGroup, pipe: Pipe) -> None:
    """Run the rank until rank 0 ends it, which ends the process. Raises ConfigError."""
    config = from_table(NodeProcess, spec["node"])
    rank = group.world.rank
    clock = SystemClock()
    agent = TransferAgent(
        f"{config.node_id}/{rank}", secrets.randbits(63), transfer_config(config, rank), clock
    )
    async with agent:
        # Not in a thread: which GPU is used is a thread's own matter, and nothing else is to do yet.
        engine, segment = node_segment(agent, partial(build_rank, spec, group, clock))
        shard = local_shard(engine, rank, segment, agent)
        # On a GPU the first sum compiles its kernel: seconds that no request shall wait.
        await block_sums(engine.cache, [0])
        arriving = ArrivingBlocks(prefix_parts(engine.cache.layout.num_layers), clock)
        server = ShardServer(shard, partial(pipe.send, PipeFrame.MESSAGE), arriving)
        loop = asyncio.get_running_loop()

        def on_message(message: bytes) -> None:
            loop.call_soon_threadsafe(server.receive, server.expect(message))

        steps = (pipe, group.device, engine.runner, on_message, arriving)
        threading.Thread(target=follow_steps, args=steps, name="pipe", daemon=True).start()
        await asyncio.Event().wait()


def main() -> int:
    """Return the exit status. What cannot be served is rank 0's to report."""
    spec, group, pipe = join_ranks()
    configure(f"{spec['node']['node_id']}/{group.world.rank}")
    try:
        asyncio.run(serve(spec, group, pipe))
    except ConfigError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
