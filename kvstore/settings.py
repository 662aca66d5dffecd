"""What a storage process is started with; read by `base.config.read_process_config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from base.config import GIB, StoreConfig, TlsConfig, TransferConfig
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
    """Of the pool, for each tenant."""
    disk: DiskSettings = field(default_factory=DiskSettings)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    host: str = "127.0.0.1"
    """Loopback, unless the network is trusted: there is no TLS on this port."""
    port: int = 0
    """0: a free one, printed at start."""
    redis_url: str = ""
    """Empty: found by `peers` alone."""
    peers: tuple[str, ...] = ()
    """Addresses of all stores, where there is no Redis; our own may be among them."""
    replicate_mib_per_s: float = 0.0
    """Copying of hot blocks to other hosts, at most; 0: none."""
    conductor_addresses: tuple[str, ...] = ()
    """host:port of each conductor's `nodes.attach_port`; its nodes may then read from here."""
    tls: TlsConfig = field(default_factory=TlsConfig)
    """To the conductor."""
    metrics_port: int = 0
    """On loopback. 0: a free one, printed at start."""

    def __post_init__(self) -> None:
        _require(bool(self.node_id), "node_id", "a name")
        _require(self.block_bytes > 0, "block_bytes", "more than 0")
        _require(self.num_blocks >= 1, "pool_gib", f"room for one block of {self.block_bytes} bytes")
        _require(self.policy in BY_NAME, "policy", f"one of {', '.join(BY_NAME)}")
        _require(
            0 < self.low_watermark <= self.high_watermark <= 1, "low_watermark", "at most high_watermark"
        )
        _require(0 < self.tenant_quota <= 1, "tenant_quota", "above 0 and at most 1")
        _require(self.replicate_mib_per_s >= 0, "replicate_mib_per_s", "not negative")
        for key in ("port", "metrics_port"):
            _require(0 <= getattr(self, key) <= 65535, key, "between 0 and 65535")

    @property
    def num_blocks(self) -> int:
        return int(self.pool_gib * GIB / self.block_bytes)

    @property
    def num_disk_blocks(self) -> int:
        if not self.disk.folder:
            return 0
        return int(self.disk.gib * GIB / (self.block_bytes + HEADER_BYTES))


def of_node(config: StoreConfig, node_id: str, block_bytes: int, transfer: TransferConfig) -> StoreProcess:
    """Return what a node's part of the block cache is started with; its disk has a folder of its own.

    Raises:
        ConfigError: the memory has no room for a block.
    """
    folder = str(Path(config.disk_path).expanduser() / node_id) if config.disk_path else ""
    try:
        return StoreProcess(
            node_id=node_id,
            block_bytes=block_bytes,
            pool_gib=config.dram_gib or block_bytes / GIB,
            policy=config.policy,
            tenant_quota=config.tenant_quota,
            disk=DiskSettings(folder, config.disk_gib),
            transfer=transfer,
            host=transfer.host,
            redis_url=config.redis_url,
            peers=config.peers,
            replicate_mib_per_s=config.replicate_mib_per_s,
        )
    except ValueError as error:
        raise ConfigError(f"store.{error}") from error


def _require(condition: bool, key: str, mend: str) -> None:
    if not condition:
        raise ValueError(f"{key}: {mend}")
