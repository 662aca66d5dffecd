"""A whole cluster as processes on this machine, with the real small model."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from base.config import (
    ClusterConfig,
    EngineConfig,
    PoolConfig,
    SchedulerConfig,
    ServerConfig,
    StoreConfig,
    TracingConfig,
    TransferConfig,
)
from bench.local_cluster import LocalCluster, local_cluster
from deploy.plan import LocalModel
from engine.model_store import prepare
from engine.weights import load_model
from tests.cluster.asking import until

CACHE_DIR = Path("~/.cache/conductor-cluster")
BLOCK_SIZE = 32


@pytest.fixture(scope="session")
def smollm2() -> LocalModel:
    found = prepare("smollm2", CACHE_DIR, print)
    return LocalModel(str(found.path), found.model_id, found.name)


@pytest.fixture(scope="module")
def tokenizer(smollm2: LocalModel) -> Tokenizer:
    return Tokenizer.from_file(str(Path(smollm2.path) / "tokenizer.json"))


@pytest.fixture(scope="module")
def model(smollm2: LocalModel) -> PreTrainedModel:
    torch.set_num_threads(1)
    return load_model(Path(smollm2.path), torch.float32)


@contextmanager
def running(
    model: LocalModel,
    folder: Path,
    prefill: int = 1,
    decode: int = 1,
    transports=("shm", "tcp"),
    store: StoreConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    kv_cache_gib: float = 0.75,
    conductors: int = 1,
    trace_out: str = "",
    tracing: TracingConfig | None = None,
    prometheus: str = "",
    of_decode=None,
    **of_prefill,
) -> Iterator[LocalCluster]:
    """Run a cluster whose chunks (50 tokens) divide neither the prompts nor the blocks.

    `of_prefill`, `of_decode`: of those nodes' engines, what is different.
    """
    engine = EngineConfig(block_size=BLOCK_SIZE, kv_cache_gib=kv_cache_gib, chunk_tokens=50, threads=1)
    config = ClusterConfig(
        server=ServerConfig(http_port=0, grpc_port=0, conductors=conductors, prometheus=prometheus),
        prefill=PoolConfig(nodes=prefill, engine=replace(engine, **of_prefill)),
        decode=PoolConfig(nodes=decode, engine=replace(engine, **(of_decode or {}))),
        transfer=TransferConfig(transports=transports),
        store=store or StoreConfig(),
        scheduler=scheduler or SchedulerConfig(roles="fixed"),
        trace_out=trace_out,
        tracing=tracing or TracingConfig(),
    )
    with local_cluster(config, model, folder) as cluster:
        until(lambda: len(cluster.status()["nodes"]) == prefill + decode)
        yield cluster


SHARED = ExitStack()
"""What ends the cluster that tests share, while there is one."""


@pytest.fixture(scope="session")
def shared_cluster(smollm2, tmp_path_factory) -> Callable[[], LocalCluster]:
    """Return what gives the cluster that tests share, and starts it where there is none."""
    running_now: list[LocalCluster] = []

    def given() -> LocalCluster:
        if not running_now:
            SHARED.callback(running_now.clear)
            running_now.append(SHARED.enter_context(running(smollm2, tmp_path_factory.mktemp("cluster"))))
        return running_now[0]

    return given


@pytest.fixture
def cluster(shared_cluster) -> LocalCluster:
    return shared_cluster()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End the shared cluster after the last test of this folder.

    Supervisors are threads of this process: those of a cluster that nobody uses would open and close files
    beneath all tests that come after.
    """
    yield
    if nextitem is None or nextitem.path.parent != item.path.parent:
        SHARED.close()
