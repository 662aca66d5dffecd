import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from base.config import ClusterConfig, EngineConfig, PoolConfig, SchedulerConfig, ServerConfig, TransferConfig
from base.errors import ConfigError
from deploy.plan import (
    HOST_ADDRESS,
    LocalModel,
    chunk_attention,
    conductor_process,
    planned_nodes,
    require_disk,
    require_known,
    require_model_there,
    sum_of,
)

MODEL = LocalModel("/models/m", "m@1", "m")


def plan(config, cores=8):
    return planned_nodes(config, MODEL, "127.0.0.1:50051", cores)


@given(prefill=st.integers(0, 5), decode=st.integers(0, 5))
def test_every_role_is_served_by_some_node_and_every_node_has_a_name(prefill, decode):
    nodes = plan(ClusterConfig(prefill=PoolConfig(nodes=prefill), decode=PoolConfig(nodes=decode)))
    assert len({node.process.node_id for node in nodes}) == len(nodes) == prefill + decode
    if nodes:
        assert {role for node in nodes for role in node.process.roles} == {"prefill", "decode"}


def test_two_pools_keep_their_roles_apart():
    roles = {node.process.node_id: node.process.roles for node in plan(ClusterConfig())}
    assert roles == {"prefill-0": ("prefill",), "decode-0": ("decode",)}


def test_a_pool_of_none_leaves_its_role_to_the_other():
    [node] = plan(ClusterConfig(prefill=PoolConfig(nodes=0)))
    assert node.process.roles == ("prefill", "decode")


def test_open_threads_share_the_cores_and_set_ones_are_kept():
    set_threads = PoolConfig(engine=EngineConfig(threads=3))
    nodes = plan(ClusterConfig(decode=set_threads), cores=8)
    assert [node.process.engine.threads for node in nodes] == [4, 3]
    assert [node.process.engine.threads for node in plan(ClusterConfig(), cores=1)] == [1, 1]


def test_the_served_name_is_the_models_unless_one_is_given():
    assert conductor_process(ClusterConfig(), MODEL).served_model_name == "m"
    assert conductor_process(ClusterConfig(served_model_name="x"), MODEL).served_model_name == "x"


def test_transfer_stays_on_loopback_exactly_when_the_conductor_does():
    here = ClusterConfig(transfer=TransferConfig(host="auto"))
    assert {node.process.transfer.host for node in plan(here)} == {"127.0.0.1"}
    everywhere = dataclasses.replace(here, server=ServerConfig(host="0.0.0.0", insecure=True))
    assert {node.process.transfer.host for node in plan(everywhere)} == {HOST_ADDRESS}


def test_what_is_needed_is_the_sum_over_all_nodes():
    prefill = PoolConfig(nodes=3, cpus_per_node=0.5, gpus_per_node=2, resource="prefill")
    config = ClusterConfig(prefill=prefill, decode=PoolConfig(nodes=2, resource="decode"))
    assert sum_of(node.resources for node in plan(config)) == {
        "CPU": 3.5,
        "GPU": 6.0,
        "prefill": 3.0,
        "decode": 2.0,
    }
    [node] = plan(ClusterConfig(prefill=PoolConfig(nodes=0)))
    assert sum_of([node.resources]) == {"CPU": 1.0}


def test_a_pipelines_chunks_are_shortened_by_what_the_profile_says_of_attention():
    engines = {
        EngineConfig(): 0.0,
        EngineConfig(pipeline_parallel=2): pytest.approx(2.1289e-05, rel=1e-4),
        EngineConfig(pipeline_parallel=2, chunk_attention=0.5): 0.5,
        EngineConfig(pipeline_parallel=2, chunk_attention=0.0): 0.0,
    }
    for engine, expected in engines.items():
        assert chunk_attention(engine, "h200-llama8b") == expected


def test_pairs_name_one_group_for_both_and_each_its_own_bundle():
    pool = PoolConfig(nodes=2, gpus_per_node=1)
    nodes = plan(ClusterConfig(hosts="together", prefill=pool, decode=pool))
    found = {
        node.process.node_id: (node.resources.together.name, node.resources.together.index) for node in nodes
    }
    assert found == {
        "prefill-0": ("pair-0", 0),
        "prefill-1": ("pair-1", 0),
        "decode-0": ("pair-0", 1),
        "decode-1": ("pair-1", 1),
    }
    assert {node.resources.together.bundles for node in nodes} == {((("CPU", 1.0), ("GPU", 1.0)),) * 2}
    assert {node.resources.together for node in plan(ClusterConfig())} == {None}


def test_metrics_leave_the_host_only_where_they_may_be_read_without_a_key():
    def metrics_hosts(**server):
        config = ClusterConfig(transfer=TransferConfig(host="auto"), server=ServerConfig(**server))
        return {node.process.metrics_host for node in plan(config)}

    assert metrics_hosts() == {"127.0.0.1"}
    assert metrics_hosts(host="0.0.0.0", insecure=True) == {HOST_ADDRESS}
    assert metrics_hosts(open_metrics=True) == {"127.0.0.1"}


def test_a_path_without_a_model_is_refused_before_anything_starts(tmp_path):
    for model in (str(tmp_path / "nowhere"), "./nowhere", "nowhere.gguf", "~/no such model"):
        with pytest.raises(ConfigError, match="no such folder or file"):
            require_model_there(model)
    with pytest.raises(ConfigError, match=r"^model: .*config\.json"):
        require_model_there(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    for model in (str(tmp_path), "smollm2", "owner/name"):
        require_model_there(model)


def test_a_disk_that_nodes_can_write_to_is_left_as_it_is(tmp_path):
    folder = tmp_path / "new" / "disk"
    for _ in range(2):
        require_disk(str(folder))
        assert list(folder.iterdir()) == []
    require_disk("")


def test_a_disk_of_a_user_whom_nobody_knows_is_named():
    with pytest.raises(ConfigError, match=r"store\.disk_path: ~nobody-at-all/kv: .*: name a folder"):
        require_disk("~nobody-at-all/kv")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (ClusterConfig(profile="h200"), "profile 'h200': no such file, and no preset"),
        (
            ClusterConfig(scheduler=SchedulerConfig(policy="round-robin")),
            "scheduler.policy 'round-robin': one of",
        ),
    ],
)
def test_a_name_that_nobody_knows_is_refused_before_anything_starts(config, told):
    with pytest.raises(ConfigError, match=told):
        require_known(config)
    require_known(ClusterConfig())
