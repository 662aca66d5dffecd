"""The configuration of a storage process, read by `base.config.read_process_config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from base.config import GIB, LOOPBACK, NodeProcess, TlsConfig, TransferConfig, require
from base.errors import ConfigError
from kvstore.eviction import BY_NAME
from kvstore.record import HEADER_BYTES


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """The disk tier; no folder: none."""

    folder: str = ""
    gib: float = 8.0

    def __post_init__(self) -> None:
        if self.gib <= 0:
            raise ValueError("disk.gib: more than 0")


@dataclass(frozen=True, slots=True)
class StoreProcess:
    """One storage process: a node of the cache without an engine."""

    node_id: str
    block_bytes: int
    """`KvLayout.block_bytes` of the model that is served."""
    pool_gib: float = 1.0
    policy: str = "admission"
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    tenant_quota: float = 1.0
    """Share of the pool that each tenant may fill."""
    disk: DiskSettings = field(default_factory=DiskSettings)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    listens: bool = True
    """Whether other stores and programs may connect; where only conductors know of it, nothing listens."""
    host: str = "127.0.0.1"
    """The address to listen on; beyond loopback it takes `tls`, or `insecure`."""
    port: int = 0
    """Port to listen on; 0: a free one, printed at start."""
    redis_url: str = ""
    """Directory that stores share; empty: they are found by `peers` alone."""
    peers: tuple[str, ...] = ()
    """Addresses of all stores, where there is no Redis; our own may be among them."""
    conductor_addresses: tuple[str, ...] = ()
    """host:port of each conductor's `nodes.attach_port`; its nodes may then read from here."""
    tls: TlsConfig = field(default_factory=TlsConfig)
    """A node's certificate, for the conductor and for other stores, of which each asks for the other's."""
    insecure: bool = False
    """Allows to listen beyond loopback without `tls`: who reaches the port reads and writes all blocks."""
    metrics_port: int = 0
    """A port on loopback; 0: a free one, printed at start."""

    def __post_init__(self) -> None:
        require(bool(self.node_id), "node_id", "a name")
        require(self.block_bytes > 0, "block_bytes", "more than 0")
        require(self.num_blocks >= 1, "pool_gib", f"room for one block of {self.block_bytes} bytes")
        require(self.policy in BY_NAME, "policy", f"one of {', '.join(BY_NAME)}")
        require(0 < self.low_watermark <= self.high_watermark <= 1, "low_watermark", "at most high_watermark")
        require(0 < self.tenant_quota <= 1, "tenant_quota", "above 0 and at most 1")
        require(
            not self.tls.is_set or bool(self.tls.ca), "tls.ca", "the authority of the nodes' certificates"
        )
        is_open = self.is_listening and self.host not in LOOPBACK and not self.tls.is_set
        require(
            not is_open or self.insecure,
            "host",
            "beyond loopback it takes tls (cert, key and ca), or insecure: true",
        )
        for key in ("port", "metrics_port"):
            require(0 <= getattr(self, key) <= 65535, key, "between 0 and 65535")

    @property
    def is_listening(self) -> bool:
        """Return whether anybody but conductors may know of this store."""
        is_known = bool(self.redis_url or self.peers or self.port or not self.conductor_addresses)
        return self.listens and is_known

    @property
    def num_blocks(self) -> int:
        return int(self.pool_gib * GIB / self.block_bytes)

    @property
    def num_disk_blocks(self) -> int:
        if not self.disk.folder:
            return 0
        return int(self.disk.gib * GIB / (self.block_bytes + HEADER_BYTES))


def of_node(config: NodeProcess, block_bytes: int) -> StoreProcess:
    """Return the configuration of a node's part of the block cache; its disk has a folder of its own.

    It listens where others find it in a directory: conductors have its blocks read without.

    Raises:
        ConfigError: the memory has no room for a block.
    """
    store, disk = config.store, DiskSettings()
    if store.disk_path:
        disk = DiskSettings(str(Path(store.disk_path).expanduser() / config.node_id), store.disk_gib)
    try:
        return StoreProcess(
            node_id=config.node_id,
            block_bytes=block_bytes,
            pool_gib=store.dram_gib or block_bytes / GIB,
            policy=store.policy,
            tenant_quota=store.tenant_quota,
            disk=disk,
            transfer=config.transfer,
            listens=bool(store.dram_gib and store.redis_url),
            host=config.transfer.host,
            redis_url=store.redis_url,
            peers=store.peers,
            tls=config.tls,
            insecure=store.insecure,
        )
    except ValueError as error:
        raise ConfigError(f"store.{error}") from error
