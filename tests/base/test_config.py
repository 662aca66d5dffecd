"""Process configuration: read back as it was written, and refused by file and key."""

import json
from dataclasses import asdict

import pytest

from base.config import (
    ClusterConfig,
    ConductorProcess,
    EngineConfig,
    NodeProcess,
    PoolConfig,
    ServerConfig,
    SloConfig,
    TracingConfig,
    TransferConfig,
    read_process_config,
)
from base.errors import ConfigError

NODE = NodeProcess(
    node_id="p0",
    roles=("prefill", "decode"),
    model_path="/models/m",
    model_id="m",
    conductor_addresses=("127.0.0.1:50051",),
    engine=EngineConfig(chunk_tokens=256),
    transfer=TransferConfig(transports=("tcp",)),
)
CONDUCTOR = ConductorProcess("/models/m", "m", "m", 64, "cpu-smollm2", ServerConfig(http_port=0), SloConfig())


@pytest.mark.parametrize("config", [NODE, CONDUCTOR])
def test_a_process_reads_what_it_was_given(tmp_path, config):
    file = tmp_path / "process.json"
    file.write_text(json.dumps(asdict(config)))
    assert read_process_config(file, type(config)) == config


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"epoch": 1}, "epoch: unknown key"),
        ({"engine": {"chunks": 1}}, "engine.chunks: unknown key; did you mean chunk_tokens"),
        ({"engine": {"chunk_tokens": 1}}, "chunk_tokens: at least 16"),
        ({"engine": {"chunk_tokens": -8192}}, "chunk_tokens: at least 16, or 0"),
        ({"engine": {"chunk_tokens": (1 << 20) + 1}}, "chunk_tokens: at most 1048576"),
        ({"engine": {"pipeline_parallel": 2, "stage_layers": [30]}}, "stage_layers: empty, or one number"),
        ({"engine": {"chunk_attention": -2.0}}, "chunk_attention: not negative, or -1"),
        ({"engine": {"chunk_tokens": "many"}}, 'engine.chunk_tokens: a whole number is wanted, not "many"'),
        ({"engine": []}, "engine: a table of keys is wanted"),
        ({"roles": "prefill"}, "roles: a list is wanted"),
        ({"transfer": {"transports": ["pigeon"]}}, "'pigeon' is not one of shm"),
    ],
)
def test_a_wrong_value_is_refused_by_file_and_key(tmp_path, change, complaint):
    file = tmp_path / "node.json"
    file.write_text(json.dumps(asdict(NODE) | change))
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_process_config(file, NodeProcess)
    assert str(file) in str(caught.value)


def test_what_a_step_has_goes_by_the_device_where_nobody_says_it():
    usual, said = EngineConfig(), EngineConfig(chunk_tokens=256, max_batch=8)
    assert [usual.prompt_tokens(on_gpu) for on_gpu in (False, True)] == [512, 8192]
    assert [usual.sequences(on_gpu) for on_gpu in (False, True)] == [64, 256]
    assert {said.prompt_tokens(on_gpu) for on_gpu in (False, True)} == {256}
    assert {said.sequences(on_gpu) for on_gpu in (False, True)} == {8}


def test_every_missing_key_is_named(tmp_path):
    file = tmp_path / "node.json"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="node_id: missing") as caught:
        read_process_config(file, NodeProcess)
    assert len(str(caught.value).splitlines()) == 7


def test_a_number_too_large_for_a_float_is_refused(tmp_path):
    file = tmp_path / "node.json"
    file.write_text(json.dumps(asdict(NODE) | {"engine": {"swap_gib": 10**400}}))
    with pytest.raises(ConfigError, match=r"engine\.swap_gib"):
        read_process_config(file, NodeProcess)


@pytest.mark.parametrize("content", [None, "", "{", "[]"])
def test_a_file_that_is_missing_or_no_table_is_refused(tmp_path, content):
    file = tmp_path / "node.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"node\.json"):
        read_process_config(file, NodeProcess)


def test_binding_beyond_loopback_must_be_asked_for():
    with pytest.raises(ValueError, match="insecure"):
        ServerConfig(host="0.0.0.0")
    assert ServerConfig(host="0.0.0.0", insecure=True).host == "0.0.0.0"


def test_pools_must_agree_on_the_block_size():
    with pytest.raises(ValueError, match=r"decode\.engine\.block_size"):
        ClusterConfig(decode=PoolConfig(engine=EngineConfig(block_size=32)))
    with pytest.raises(ValueError, match=r"decode\.engine\.quantization: .*mixed_weights"):
        ClusterConfig(decode=PoolConfig(engine=EngineConfig(quantization="int4")))
    ClusterConfig(decode=PoolConfig(engine=EngineConfig(quantization="int4")), mixed_weights=True)
    with pytest.raises(ValueError, match=r"decode\.engine\.kv_dtype: equal to prefill\.engine\.kv_dtype"):
        ClusterConfig(prefill=PoolConfig(engine=EngineConfig(kv_dtype="fp8")), mixed_weights=True)
    ClusterConfig(prefill=PoolConfig(engine=EngineConfig(kv_dtype="fp8")), decode=PoolConfig(nodes=0))
    with pytest.raises(ValueError, match="quantization: one of none, fp8, int8, int4"):
        EngineConfig(quantization="int2")


def test_a_pool_has_a_gpu_for_each_rank():
    engine = EngineConfig(pipeline_parallel=2, tensor_parallel=2)
    assert PoolConfig(gpus_per_node=4, engine=engine).gpus_per_node == 4
    with pytest.raises(ValueError, match="gpus_per_node: 0, or one at least for each rank"):
        PoolConfig(gpus_per_node=3, engine=engine)


MARKED = {"prefill": PoolConfig(resource="p"), "decode": PoolConfig(resource="d")}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"hosts": "near"}, "one of any, apart, together"),
        ({"hosts": "apart"}, "prefill.resource and decode.resource"),
        ({"hosts": "apart", **MARKED, "decode": PoolConfig(resource="p")}, "mark of its own"),
        ({"hosts": "together", "decode": PoolConfig(nodes=2)}, "they are pairs"),
    ],
)
def test_hosts_that_cannot_be_had_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        ClusterConfig(**settings)


def test_pools_may_be_kept_apart_by_marks_or_in_pairs():
    assert ClusterConfig(hosts="apart", **MARKED).hosts == "apart"
    assert ClusterConfig(hosts="together").hosts == "together"


@pytest.mark.parametrize(
    "wrong",
    [
        *({"endpoint": "h:4317"}, {"sample": 1.5}, {"sample": -0.1}),
        *({"page": "javascript:{trace_id}"}, {"page": "http://jaeger:16686/trace"}),
    ],
)
def test_a_tracing_section_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TracingConfig(**wrong)
