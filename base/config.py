"""The configuration of a cluster and of each process: frozen values, read once.

`cluster.yaml` is one `ClusterConfig`, read by `deploy/config_file.py`. Every process is
then handed its own part as JSON, read back by `read_process_config`.

What is *found out* at start (how many blocks fit, which port was free) is a return value
that travels on, never a field written back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from base.errors import ConfigError
from base.tables import TableError, from_table, read_json
from base.transports import TRANSPORTS

GIB = 1 << 30
"""Bytes; cluster.yaml speaks of GiB."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")

T = TypeVar("T")


def require(condition: bool, key: str, mend: str) -> None:
    """Refuse a value of the key; a reader of configurations adds the path of the table."""
    if not condition:
        raise ValueError(f"{key}: {mend}")


WEIGHT_FORMATS = ("none", "fp8", "int8", "int4")
"""Formats of weights; none: floats."""

KV_DTYPES = ("auto", "fp8")
"""Numbers that K and V may be cached in; auto: as the model computes."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a node runs the model."""

    device: str = "auto"
    """auto: cuda where there is one, else cpu."""
    dtype: str = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU (bf16 prefill is 7x slower there)."""
    block_size: int = 64
    """Tokens per KV block; a multiple of 16."""
    kv_cache_gib: float = 0.0
    """Size of the KV cache; 0: what is left of GPU memory, or 1 GiB on a CPU."""
    swap_gib: float = -1.0
    """Host memory for the KV of preempted sequences, on a node of one rank; see `engine/swap_space.py`.
    0: they are recomputed; -1: 4 GiB beside a GPU, none on a CPU."""
    chunk_tokens: int = 0
    """Tokens of prompts in one step at most: a limit for memory. 0: 8,192 on a GPU, 512 on a CPU."""
    chunk_attention: float = -1.0
    """Shortens the later chunks of a prompt, so that each takes as long as the first. Seconds of
    attention for each token squared over those of the linear layers for each token. 0: chunks are
    equally long; -1: in a pipeline what the profile says, elsewhere 0."""
    max_batch: int = 0
    """Sequences in one step at most; 0: 256 on a GPU, 64 on a CPU."""
    threads: int = 0
    """CPU threads; 0: cores divided by the nodes on this host."""
    max_model_len: int = 0
    """Tokens of the context window; 0: what the model says."""
    kv_dtype: str = "auto"
    """Dtype of cached K and V. auto: the model's; fp8: e4m3 with a scale for each block and head."""
    layer_groups: int = 8
    """Parts in which a GPU's long chunk sends its KV, each when its layers are computed.
    In 8, 0.06 % of the prefill of 16,384 tokens is exposed over NVLink; in 1, 0.6 %."""
    quantization: str = "none"
    """Format of the weights of a float checkpoint, quantised when it is loaded."""
    random_weights: bool = False
    """Draw the weights and read none: for measuring a model's shape without its files."""
    tensor_parallel: int = 1
    """Ranks, each a process with a GPU of its own (or a share of the CPU), that share the heads of
    each layer."""
    pipeline_parallel: int = 1
    """Stages, each of `tensor_parallel` ranks with a range of the layers: chunks of a prompt follow
    each other through them. For nodes that prefill: others gain nothing by it."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage; empty: as equal as can be."""

    def __post_init__(self) -> None:
        require(self.device in ("auto", "cpu", "cuda"), "device", "one of auto, cpu, cuda")
        dtypes = ("auto", "float32", "float16", "bfloat16")
        require(self.dtype in dtypes, "dtype", f"one of {', '.join(dtypes)}")
        require(self.kv_dtype in KV_DTYPES, "kv_dtype", f"one of {', '.join(KV_DTYPES)}")
        require(self.block_size >= 16 and self.block_size % 16 == 0, "block_size", "a multiple of 16")
        for key in ("kv_cache_gib", "max_batch", "threads", "max_model_len"):
            require(getattr(self, key) >= 0, key, "not negative")
        require(self.chunk_tokens == 0 or self.chunk_tokens >= 16, "chunk_tokens", "at least 16, or 0")
        require(self.chunk_tokens <= 1 << 20, "chunk_tokens", f"at most {1 << 20}")
        for key in ("chunk_attention", "swap_gib"):
            require(getattr(self, key) >= 0 or getattr(self, key) == -1, key, "not negative, or -1")
        for key in ("layer_groups", "tensor_parallel", "pipeline_parallel"):
            require(getattr(self, key) >= 1, key, "at least 1")
        is_split = len(self.stage_layers) == self.pipeline_parallel and min(self.stage_layers) >= 1
        mend = "empty, or one number of layers for each stage"
        require(not self.stage_layers or is_split, "stage_layers", mend)
        known = ", ".join(WEIGHT_FORMATS)
        require(self.quantization in WEIGHT_FORMATS, "quantization", f"one of {known}")

    def sequences(self, on_gpu: bool) -> int:
        """Return how many sequences a step has at most."""
        return self.max_batch or (256 if on_gpu else 64)

    def prompt_tokens(self, on_gpu: bool) -> int:
        """Return how many tokens of prompts a step has at most."""
        return self.chunk_tokens or (8192 if on_gpu else 512)


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """One pool of nodes of the same role."""

    nodes: int = 1
    gpus_per_node: int = 0
    cpus_per_node: float = 1.0
    resource: str = ""
    """A Ray custom resource of which each node takes one: keeps a pool on its own hosts.
    Empty: any host with room."""
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        require(self.nodes >= 0, "nodes", "not negative")
        require(self.gpus_per_node >= 0, "gpus_per_node", "not negative")
        ranks = self.engine.tensor_parallel * self.engine.pipeline_parallel
        require(
            self.gpus_per_node == 0 or self.gpus_per_node >= ranks,
            "gpus_per_node",
            "0, or one at least for each rank of engine.tensor_parallel and engine.pipeline_parallel",
        )
        require(self.cpus_per_node > 0, "cpus_per_node", "more than 0")


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files of one end of TLS connections; read by `base/tls.py`."""

    cert: str = ""
    """The chain, own certificate first. Empty: no TLS."""
    key: str = ""
    ca: str = ""
    """Signed the other end's certificate."""

    def __post_init__(self) -> None:
        require(bool(self.cert) == bool(self.key), "key", "set where cert is, and only there")
        require(bool(self.cert) or not self.ca, "ca", "only with cert and key")

    @property
    def is_set(self) -> bool:
        return bool(self.cert)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where the conductor listens, and the bounds of what it accepts."""

    host: str = "127.0.0.1"
    conductors: int = 1
    """Processes. Nodes attach to each, and clients may ask any of them."""
    http_port: int = 8000
    """Port of the HTTP API; 0: a free one, printed at start. Of several conductors, the others count up."""
    grpc_port: int = 50051
    """Port of the gRPC API; 0: a free one. Counts up as `http_port`."""
    tls: TlsConfig = field(default_factory=TlsConfig)
    """Certificates of HTTP and gRPC. With a `ca`, clients must show a certificate that it signed."""
    keys_file: str = ""
    """API keys, by `conductor keys`. Empty: clients need none."""
    critical_tenants: tuple[str, ...] = ()  # Where there are no keys. "*": all.
    open_metrics: bool = False
    """Whether metrics need no key."""
    prometheus: str = ""
    """`http://host:port` of the one that scrapes the cluster, whose answers /ui shows. Empty: none."""
    insecure: bool = False
    """Allows to bind anything but loopback without TLS or without keys."""
    cors_origins: tuple[str, ...] = ()
    """Origins (`https://host`) whose pages may call the HTTP API from a browser; `*`: all."""
    model_family: str = ""
    """The form of tool calls and reasoning. Empty: by the model's chat template; plain: text alone."""
    max_body_mib: float = 8.0
    max_waiting: int = 1024  # Requests admitted and not finished; more are rejected at once.
    request_timeout_s: float = 600.0
    stream_interval_ms: float = 0.0
    """Least time between two pieces of one answer; 0: tokens as they come, while there is time for each."""
    lease_s: float = 10.0
    """A node or conductor that stays silent this long has lost what it held."""
    heartbeat_s: float = 2.0

    def __post_init__(self) -> None:
        for key in ("http_port", "grpc_port"):
            require(0 <= getattr(self, key) <= 65536 - self.conductors, key, "between 0 and 65535")
        require(1 <= self.conductors <= 100, "conductors", "between 1 and 100")
        gap = abs(self.http_port - self.grpc_port) if self.http_port and self.grpc_port else self.conductors
        require(gap >= self.conductors, "grpc_port", "another than http_port, by server.conductors at least")
        require(self.max_body_mib > 0, "max_body_mib", "more than 0")
        require(self.max_waiting >= 1, "max_waiting", "at least 1")
        require(self.request_timeout_s > 0, "request_timeout_s", "more than 0")
        require(self.stream_interval_ms >= 0, "stream_interval_ms", "not negative")
        require(self.heartbeat_s > 0, "heartbeat_s", "more than 0")
        require(self.lease_s >= 3 * self.heartbeat_s, "lease_s", "at least three heartbeats")
        is_url = self.prometheus.startswith(("http://", "https://"))
        require(is_url or not self.prometheus, "prometheus", "http://host:port, or https")
        require(
            self.host in LOOPBACK or self.insecure or (self.tls.is_set and bool(self.keys_file)),
            "host",
            "loopback, or set tls and keys_file, or insecure: true on a trusted network",
        )


@dataclass(frozen=True, slots=True)
class NodesConfig:
    """How nodes reach the conductor, by a listener of their own; and their metrics' port."""

    attach_port: int = 0
    """Port that nodes attach to; 0: a free one. Counts up as `server.http_port`."""
    metrics_port: int = 0
    """Port of each node on its host; 0: a free one."""
    tls: TlsConfig = field(default_factory=TlsConfig)
    """A node's; the conductor checks nodes by the same `ca`."""

    def __post_init__(self) -> None:
        for key in ("attach_port", "metrics_port"):
            require(0 <= getattr(self, key) <= 65535, key, "between 0 and 65535")
        require(bool(self.tls.ca) == self.tls.is_set, "tls.ca", "set where tls.cert is: both are checked")


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """How KV bytes move."""

    host: str = "127.0.0.1"
    """The address that this node's peers reach it by."""
    port: int = 0
    """Port that peers reach this node at; 0: a free one."""
    transports: tuple[str, ...] = ("shm", "tcp")
    """Allowed ones; the fastest that reaches a peer is used."""
    timeout_s: float = 20.0
    """One transfer batch at most. Shorter than every lease that covers one."""
    connections: int = 2
    """Connections of tcp to each peer, each with a thread where there are four processors for one."""

    def __post_init__(self) -> None:
        known = ", ".join(TRANSPORTS)
        require(bool(self.transports), "transports", f"at least one of {known}")
        for transport in self.transports:
            require(transport in TRANSPORTS, "transports", f"{transport!r} is not one of {known}")
        require(self.timeout_s > 0, "timeout_s", "more than 0")
        require(1 <= self.connections <= 64, "connections", "between 1 and 64")


EVICTION_POLICIES = ("lru", "lfu", "length_aware", "admission")
"""Made by `kvstore/eviction.py`."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Each node's share of the block cache: KV beyond what its engine has room for."""

    dram_gib: float = 0.0
    """Memory of each node's host; 0: none."""
    disk_path: str = ""
    """A folder on each node's host, which must be a local disk; empty: none."""
    disk_gib: float = 8.0
    """Disk space of each node."""
    policy: str = "admission"
    """The order in which blocks are evicted."""
    tenant_quota: float = 1.0
    """Share of a node's memory that each tenant may fill."""
    redis_url: str = ""
    """Where other programs share the cache; empty: the conductor's index knows where blocks are."""
    peers: tuple[str, ...] = ()
    """host:port of storage processes, where there is no Redis."""
    save_mib_per_s: float = 512.0
    """Bandwidth of saving from each node's engine, at most."""
    insecure: bool = False
    """Let nodes' stores listen beyond loopback without `nodes.tls`: who reaches one has all blocks."""

    def __post_init__(self) -> None:
        require(self.dram_gib >= 0, "dram_gib", "not negative")
        require(self.policy in EVICTION_POLICIES, "policy", f"one of {', '.join(EVICTION_POLICIES)}")
        require(self.disk_gib > 0, "disk_gib", "more than 0")
        require(not self.disk_path or self.dram_gib > 0, "disk_path", "only with dram_gib above 0")
        require(0 < self.tenant_quota <= 1, "tenant_quota", "above 0 and at most 1")
        require(self.save_mib_per_s > 0, "save_mib_per_s", "more than 0")

    @property
    def is_used(self) -> bool:
        return bool(self.dram_gib or self.redis_url or self.peers)


@dataclass(frozen=True, slots=True)
class SloConfig:
    """Bounds of requests that name none; 0: unbounded."""

    ttft_s: float = 0.0
    tbt_s: float = 0.0
    longest_gap_s: float = 0.0
    """Bound on the longest gap between two tokens, where tbt_s bounds the mean of a request's gaps."""

    def __post_init__(self) -> None:
        for key in ("ttft_s", "tbt_s", "longest_gap_s"):
            require(getattr(self, key) >= 0, key, "not negative")


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """Where spans of requests are sent, by OTLP over gRPC."""

    endpoint: str = ""
    """http://host:4317, or https://. Empty: nothing is traced."""
    sample: float = 1.0
    """Share of requests that are traced, of those whose client does not say."""
    page: str = ""
    """The address of a trace's page, with `{trace_id}` in it, which /ui links to. Empty: no link."""

    def __post_init__(self) -> None:
        schemes = "http://", "https://"
        is_url = self.endpoint.startswith(schemes)
        require(is_url or not self.endpoint, "endpoint", "http://host:4317, https://host:4317, or empty")
        is_page = self.page.startswith(schemes) and "{trace_id}" in self.page
        mend = "http://host:16686/trace/{trace_id}, or another address with {trace_id}"
        require(is_page or not self.page, "page", mend)
        require(0 <= self.sample <= 1, "sample", "between 0 and 1")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How the conductor decides, and what it keeps of its decisions."""

    policy: str = "global"
    """The name of the rule of conductor/placing/prefill_policies.py that chooses who computes a prompt."""
    reject: str = "predict"
    """When decode load is tested against a TBT bound: none, late, early or predict."""
    fetch: bool = True
    """Whether a prefix may be loaded from another node."""
    kvcache_balancing_threshold: float = 0.0
    """Load where best match / own match is at least this; 0: the cost model decides."""
    roles: str = "follow"
    """Whether roles follow the load: follow, or fixed. Under `follow` a pool is what its nodes prefer: each
    does the other's work where that is predicted to be better, and may change."""
    ttft_headroom: float = 0.85
    """A prediction within so much of a TTFT bound is taken to keep it."""
    ahead_s: float = 0.5
    """Queued on a prefill node at most before requests wait at the conductor, where they are ordered."""
    step_budgets: bool = True
    """Whether steps take as many tokens of prompts as those who decode in them can bear. false:
    `chunk_tokens`, whatever they bear, to compare with."""
    max_waiting: int = 512  # There; more are let go, of the tenant with the most.
    patience_s: float = 60.0
    """Seconds that a request without a TTFT bound waits there at most. One that would wait longer is rejected
    at once, unless `reject` is none."""
    role_wait_s: float = 10.0  # For a node of a role to come back when none is left.
    decision_log: str = ""
    """A file for every decision, as JSON lines. Empty: none."""
    decision_log_mib: float = 64.0
    """Size of the file, and again of the one before it."""

    def __post_init__(self) -> None:
        known = ("none", "late", "early", "predict")
        require(self.reject in known, "reject", f"one of {', '.join(known)}")
        require(self.kvcache_balancing_threshold >= 0, "kvcache_balancing_threshold", "not negative")
        require(self.roles in ("follow", "fixed"), "roles", "follow or fixed")
        require(
            self.step_budgets or self.roles == "fixed",
            "roles",
            "fixed, or step_budgets true, by which those who decode have their tokens in time",
        )
        require(0 < self.ttft_headroom <= 1, "ttft_headroom", "above 0, at most 1")
        require(self.ahead_s >= 0, "ahead_s", "not negative")
        require(self.max_waiting >= 1, "max_waiting", "at least 1")
        require(self.patience_s > 0, "patience_s", "more than 0")
        require(self.role_wait_s >= 0, "role_wait_s", "not negative")
        require(self.decision_log_mib > 0, "decision_log_mib", "more than 0")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """`cluster.yaml`."""

    name: str = ""  # What commands call the cluster. Empty: its HTTP port.
    model: str = "smollm2"
    """A folder (safetensors and tokenizer), a .gguf file, a hub name, or smollm2."""
    served_model_name: str = ""
    """Name by which clients ask for the model; empty: the last part of `model`."""
    cache_dir: str = "~/.cache/conductor-cluster"
    trace_out: str = ""
    """A folder on each host for nodes' timelines, which Chrome and Perfetto show; empty: none."""
    profile: str = "cpu-smollm2"
    """Costs that placement starts from: a preset, or a JSON file of the same form."""
    hosts: str = "any"
    """Hosts of prefill and decode nodes: any, apart (no host has both) or together (in pairs)."""
    mixed_weights: bool = False
    """Whether nodes may have weights of different formats, and take each other's KV for their own."""
    server: ServerConfig = field(default_factory=ServerConfig)
    nodes: NodesConfig = field(default_factory=NodesConfig)
    prefill: PoolConfig = field(default_factory=PoolConfig)
    decode: PoolConfig = field(default_factory=PoolConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)

    def __post_init__(self) -> None:
        is_name = self.name.isascii() and self.name.replace("-", "_").isidentifier() and len(self.name) <= 40
        require(is_name or not self.name, "name", "a letter, then letters, digits, - and _, 40 at most")
        require(bool(self.model), "model", "a folder, a .gguf file, a hub name or smollm2")
        self._require_hosts()
        require(
            self.nodes.tls.is_set == self.server.tls.is_set,
            "nodes.tls.cert",
            "set where server.tls.cert is, and only there",
        )
        sizes = {self.prefill.engine.block_size, self.decode.engine.block_size}
        require(len(sizes) == 1, "decode.engine.block_size", "equal to prefill.engine.block_size")
        stored = {self.prefill.engine.kv_dtype, self.decode.engine.kv_dtype}
        both = self.prefill.nodes and self.decode.nodes
        require(len(stored) == 1 or not both, "decode.engine.kv_dtype", "equal to prefill.engine.kv_dtype")
        formats = {self.prefill.engine.quantization, self.decode.engine.quantization}
        require(
            len(formats) == 1 or self.mixed_weights,
            "decode.engine.quantization",
            "equal to prefill.engine.quantization, or mixed_weights: true, if their KV is compatible",
        )

    def _require_hosts(self) -> None:
        require(self.hosts in ("any", "apart", "together"), "hosts", "one of any, apart, together")
        marks = self.prefill.resource, self.decode.resource
        require(
            self.hosts != "apart" or (all(marks) and marks[0] != marks[1]),
            "hosts",
            "apart wants prefill.resource and decode.resource, each a mark of its own hosts",
        )
        require(
            self.hosts != "together" or self.prefill.nodes == self.decode.nodes,
            "hosts",
            "together wants as many decode.nodes as prefill.nodes: they are pairs",
        )


@dataclass(frozen=True, slots=True)
class ConductorProcess:
    """The configuration of a conductor process."""

    model_path: str
    model_id: str
    served_model_name: str
    block_size: int
    profile: str
    server: ServerConfig
    slo: SloConfig
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    nodes: NodesConfig = field(default_factory=NodesConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    """The store of its nodes."""


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """The configuration of a node process."""

    node_id: str
    roles: tuple[str, ...]
    model_path: str
    model_id: str
    conductor_addresses: tuple[str, ...]
    engine: EngineConfig
    transfer: TransferConfig
    store: StoreConfig = field(default_factory=StoreConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    """Certificates for the connection to the conductor."""
    rounded: str = ""
    """Path of the model's rounded weights without their format; empty: they are not kept."""
    mixed_weights: bool = False
    """Whether KV of weights of another format stands for this node's."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    """Port of the metrics; 0: a free one."""
    trace_out: str = ""
    """A folder for a timeline, written at the end; empty: none is kept."""
    tracing: TracingConfig = field(default_factory=TracingConfig)


def read_process_config(path: Path, into: type[T]) -> T:
    """Read a JSON file into a frozen dataclass.

    Raises:
        ConfigError: the file is missing or no JSON, a key is unknown or missing, or a
            value is of the wrong type or refused. The message names file and key.
    """
    table = read_json(path)
    try:
        return from_table(into, table)
    except TableError as error:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in error.problems)) from error
