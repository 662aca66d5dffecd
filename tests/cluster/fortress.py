"""A cluster with all that guards one: TLS, certificates of nodes, keys, and stores that Redis tells of."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import redis

from base.config import (
    ClusterConfig,
    EngineConfig,
    NodesConfig,
    PoolConfig,
    SchedulerConfig,
    ServerConfig,
    StoreConfig,
    TlsConfig,
    TransferConfig,
)
from base.tls import NODE_NAME
from bench.local_cluster import LocalCluster, local_cluster
from conductor.api.keys import KeyFile, Quota, change_keys, made_key
from deploy.plan import LocalModel
from kvstore.wire import Member, member_from_bytes
from tests.certificates import Authority
from tests.cluster.asking import PATIENCE_S, until
from tests.cluster.test_store import storage_process
from tests.deploy.processes import MARK, listening, marked_environment, marked_pids
from tests.kvstore.redis_server import running_server

BLOCK_SIZE = 32
BLOCK_BYTES = 30 * 2 * BLOCK_SIZE * 3 * 64 * 4
"""Bytes of a block of smollm2: 30 layers, K and V, 3 heads of 64, 4 bytes."""
TENANTS = ("victim", "foreign", "operator")
COUNTED = re.compile(r"^(kvstore|prefill_tokens|decode_tokens|transfer_(bytes|failures)|conductor_\w*tokens)")
"""Metrics that change when something is read, written or computed."""


@dataclass(frozen=True)
class Fortress:
    """The cluster, and what those who belong to it have."""

    cluster: LocalCluster
    model_id: str
    storage: dict[str, Any]
    """What the storage process said when it was ready."""
    authority: Authority
    node: TlsConfig
    keys: dict[str, str]
    redis_url: str
    mark: str
    """In the environment of each process."""
    numbers: Iterator[int] = field(default_factory=count)
    """One for each test that wants prompts of its own."""

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.cluster.http_port}"

    def pids(self) -> list[int]:
        return list(marked_pids({MARK: self.mark}))

    def ports(self) -> list[int]:
        """Return every port on which a process of the cluster listens."""
        return sorted({port for _, port in listening(self.pids())})

    def metrics_ports(self) -> list[int]:
        told = [*self.cluster.ready.values(), self.storage]
        return sorted(said["metrics_port"] for said in told if "metrics_port" in said)

    def bearer(self, tenant: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[tenant]}"}

    def context(self, own: TlsConfig | None = None) -> ssl.SSLContext:
        """Return what dials as a client does, with a certificate of its own or without."""
        context = ssl.create_default_context(cafile=self.authority.path)
        if own is not None:
            context.load_cert_chain(own.cert, own.key)
        return context

    def credentials(self, own: TlsConfig | None = None) -> grpc.ChannelCredentials:
        pair = [Path(path).read_bytes() for path in (own.key, own.cert)] if own is not None else [None, None]
        return grpc.ssl_channel_credentials(self.authority.pem, *pair)

    def get(self, path: str, tenant: str = "operator") -> httpx.Response:
        headers = self.bearer(tenant)
        return httpx.get(f"{self.url}{path}", headers=headers, verify=self.context(), timeout=PATIENCE_S)

    def nodes(self) -> dict[str, str]:
        """Return the epoch of each node that is attached."""
        return {node["id"]: node["epoch"] for node in self.get("/status").json()["nodes"]}

    def counted(self) -> dict[str, float]:
        """Return what all processes count of blocks, tokens and bytes, and who is attached."""
        texts = [httpx.get(f"http://127.0.0.1:{port}/metrics").text for port in self.metrics_ports()]
        found: dict[str, float] = {}
        for number, text in enumerate([self.get("/metrics").text, *texts]):
            for row in filter(COUNTED.match, text.splitlines()):
                name, _, value = row.rpartition(" ")
                found[f"{number} {name}"] = float(value)
        return found

    def members(self) -> list[Member]:
        """Return all stores, the secrets of their data ports included, as Redis has them for nodes."""
        with redis.Redis.from_url(self.redis_url) as client:
            return [member_from_bytes(client.get(name)) for name in client.keys("*m:*")]


@contextmanager
def fortress(model: LocalModel, folder: Path) -> Iterator[Fortress]:
    """Run one in the body."""
    authority = Authority(folder / "certificates")
    node = authority.issue("node", NODE_NAME)
    server, keys = _guarded_server(folder, authority)
    with running_server() as redis_server, _marked() as mark:
        engine = EngineConfig(block_size=BLOCK_SIZE, kv_cache_gib=0.25, chunk_tokens=64, threads=1)
        config = ClusterConfig(
            server=server,
            nodes=NodesConfig(tls=node),
            prefill=PoolConfig(nodes=1, engine=engine),
            decode=PoolConfig(nodes=1, engine=engine),
            transfer=TransferConfig(transports=("tcp",)),
            # Every prompt is handed over, so that all ports are used.
            scheduler=SchedulerConfig(roles="fixed"),
            store=StoreConfig(
                dram_gib=0.25, disk_path=str(folder / "disk"), disk_gib=0.5, redis_url=redis_server.url
            ),
        )
        with (
            local_cluster(config, model, folder) as cluster,
            _storage_of(folder, node, redis_server.url, cluster) as said,
        ):
            started = Fortress(cluster, model.model_id, said, authority, node, keys, redis_server.url, mark)
            until(lambda: len(started.nodes()) == 3)
            yield started


@contextmanager
def _marked() -> Iterator[str]:
    """Have all processes that are started in the body carry a mark."""
    mark = marked_environment()[MARK]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(MARK, mark)
        yield mark


def _guarded_server(folder: Path, authority: Authority) -> tuple[ServerConfig, dict[str, str]]:
    """Return the conductor's configuration with TLS and keys, and each tenant's key."""
    made = {name: made_key(name, name, operator=name == "operator") for name in TENANTS}
    keys_file = folder / "keys.json"
    records = tuple(key for key, _ in made.values())
    change_keys(keys_file, lambda: KeyFile({name: Quota() for name in TENANTS}, records))
    tls = authority.issue("server", ca=False)
    server = ServerConfig(http_port=0, grpc_port=0, keys_file=str(keys_file), tls=tls)
    return server, {name: secret for name, (_, secret) in made.items()}


@contextmanager
def _storage_of(
    folder: Path, node: TlsConfig, redis_url: str, cluster: LocalCluster
) -> Iterator[dict[str, Any]]:
    settings = {
        "pool_gib": 0.1,
        "disk": {"folder": str(folder / "storage-disk"), "gib": 0.2},
        "transfer": {"transports": ["tcp"]},
        "redis_url": redis_url,
        "conductor_addresses": [cluster.attach_address],
        "tls": asdict(node),
    }
    with storage_process(folder, **settings) as said:
        yield said
