"""`python -m conductor` as it is deployed, with stub nodes in a process of their own.

    with stub_cluster(profile, num_prefill=2, num_decode=2) as running: ...

For benches of the conductor: what the nodes would do takes the time that the profile says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import uvloop

from base.attach import AttachClient
from base.clock import SystemClock
from base.config import (
    ClusterConfig,
    EngineConfig,
    NodesConfig,
    PoolConfig,
    SchedulerConfig,
    ServerConfig,
    TlsConfig,
)
from base.grants import PeerDescriptor
from base.messages import NodeInfo
from base.request import NodeId, Role
from base.tls import dialling_context
from bench.local_cluster import smollm2
from bench.stub_node import StubNode
from bench.timed_node import TimedNode
from conductor.placing.cost_model import CostModel
from conductor.placing.profile import Profile, profile_json
from conductor.profiles.reader import load_profile
from deploy.plan import conductor_process

BLOCK_SIZE = 32
NUM_BLOCKS = 10_000
NODES_WAIT_S = 60.0
"""For the nodes to attach, on a busy machine."""


@dataclass(frozen=True, slots=True)
class StubCluster:
    """A running one."""

    http_port: int
    grpc_port: int
    conductor_pid: int
    folder: Path
    """Where its configuration is."""

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"


@contextmanager
def stub_cluster(
    profile: Profile,
    num_prefill: int,
    num_decode: int,
    server: ServerConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    module: str = "conductor",
    max_model_len: int = 0,
    timed: bool = False,
) -> Iterator[StubCluster]:
    """Run a conductor for SmolLM2's tokenizer and stub nodes in the body.

    Args:
        server: The conductor's; its TLS is the nodes' own too.
        module: What is run as the conductor, with its configuration.
        max_model_len: Of the model, as the conductor is to believe; 0: the model's own.
        timed: Whether nodes are those of `timed_node.py`, which take more of the processor.
    """
    server = server or ServerConfig()
    tls = server.tls
    model = smollm2()
    pool = PoolConfig(engine=EngineConfig(block_size=BLOCK_SIZE))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if max_model_len:
            model = replace(model, path=str(_with_window(Path(model.path), folder, max_model_len)))
        profile_path, config_path = folder / "profile.json", folder / "conductor.json"
        profile_path.write_text(profile_json(profile))
        cluster = ClusterConfig(
            profile=str(profile_path),
            server=replace(server, http_port=0, grpc_port=0, tls=replace(tls, ca="")),
            nodes=NodesConfig(tls=tls),
            prefill=pool,
            decode=pool,
            scheduler=replace(scheduler or SchedulerConfig(roles="fixed"), role_wait_s=NODES_WAIT_S),
        )
        config_path.write_text(json.dumps(asdict(conductor_process(cluster, model))))
        conductor = _started(module, "--config", str(config_path))
        nodes = None
        try:
            assert conductor.stdout is not None
            ready = json.loads(conductor.stdout.readline())
            address = f"127.0.0.1:{ready['attach_port']}"
            counts = ["--prefill", str(num_prefill), "--decode", str(num_decode)]
            if tls.is_set:
                counts += ["--tls", tls.cert, tls.key, tls.ca]
            if timed:
                counts.append("--timed")
            nodes = _started("bench.stub_cluster", address, model.model_id, str(profile_path), *counts)
            yield StubCluster(ready["http_port"], ready["grpc_port"], conductor.pid, folder)
        finally:
            for process in (conductor, nodes):
                if process is not None:
                    process.terminate()
                    process.wait(40)


def _with_window(model: Path, folder: Path, max_model_len: int) -> Path:
    """Return a folder of the small files of `model`, whose context window is another."""
    changed = folder / "model"
    changed.mkdir()
    for file in model.iterdir():
        if file.name != "config.json":
            (changed / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"max_position_embeddings": max_model_len}))
    return changed


def _started(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def stub_info(
    name: str, roles: frozenset[Role], model_id: str, num_blocks: int = NUM_BLOCKS, max_model_len: int = 4096
) -> NodeInfo:
    """Return what a stub node says of itself."""
    return NodeInfo(
        node_id=NodeId(name),
        epoch=1,
        roles=roles,
        model_id=model_id,
        layout_id="stub",
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        peer=PeerDescriptor(name, 1, ()),
        host="here",
    )


async def serve_nodes(
    address: str, model_id: str, profile: Profile, counts: dict[Role, int], tls: TlsConfig, timed: bool
) -> None:
    cost, clock = CostModel(profile), SystemClock()
    secured = dialling_context(tls, "nodes.tls")
    numbers = [(role, number) for role, count in counts.items() for number in range(count)]
    async with asyncio.TaskGroup() as group:
        for role, number in numbers:
            info = stub_info(f"{role.value}-{number}", frozenset({role}), model_id)
            rng = random.Random(number)
            if timed:
                TimedNode(info, cost, clock, group).attach(address, rng, secured)
                continue
            node, client = StubNode(cost, NUM_BLOCKS, BLOCK_SIZE), AttachClient(info, address, rng, secured)
            node.send = client.send
            group.create_task(node.run())
            group.create_task(client.run(node))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.stub_cluster", description=__doc__)
    for name in ("address", "model_id", "profile"):
        parser.add_argument(name)
    for name in ("--prefill", "--decode"):
        parser.add_argument(name, type=int)
    parser.add_argument("--tls", nargs=3, default=("", "", ""), help="certificate, key, authority")
    parser.add_argument("--timed", action="store_true", help="nodes as they ship, but for the device")
    options = parser.parse_args()
    counts, profile = (
        {Role.PREFILL: options.prefill, Role.DECODE: options.decode},
        load_profile(options.profile),
    )
    tls = TlsConfig(*options.tls)
    uvloop.run(serve_nodes(options.address, options.model_id, profile, counts, tls, options.timed))


if __name__ == "__main__":
    main()
