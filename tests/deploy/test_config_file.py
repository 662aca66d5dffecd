import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from base.config import ClusterConfig
from base.errors import ConfigError
from deploy.config_file import read_cluster_config


def read(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return read_cluster_config(path)


def test_an_empty_file_is_all_defaults(tmp_path):
    assert read(tmp_path, "") == ClusterConfig()


def test_a_value_reaches_its_field(tmp_path):
    config = read(tmp_path, "prefill: {nodes: 3}\ntransfer: {transports: [tcp]}\nslo: {ttft_s: 2}\n")
    assert config.prefill.nodes == 3
    assert config.transfer.transports == ("tcp",)
    assert config.slo.ttft_s == 2.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("server:\n  http_prot: 1\n", ":2: server.http_prot: unknown key; did you mean http_port?"),
        ("xyzzy: 1\n", ":1: xyzzy: unknown key; known here: name, model, served_model_name, cache_dir,"),
        ("\nserver:\n  http_port: '80'\n", ':3: server.http_port: a whole number is wanted, not "80"'),
        ("server: {insecure: 1}", ":1: server.insecure: true or false is wanted, not 1"),
        ("server: 3", ":1: server: a table of keys is wanted, not 3"),
        ("- 1", ":1: the file: a table of keys is wanted, not [1]"),
        ("transfer:\n  transports:\n  - shm\n  - 4\n", ":4: transfer.transports.1: text is wanted, not 4"),
        ("server:\n  http_port: 70000\n", ":2: server.http_port: between 0 and 65535; it is 70000"),
        ("server: {http_port: 80, grpc_port: 80}", "server.grpc_port: another than http_port"),
        (
            "server: {http_port: 80, grpc_port: 81, conductors: 2}",
            "another than http_port, by server.conductors",
        ),
        ("slo:\n  ttft_s: -2\n", ":2: slo.ttft_s: not negative; it is -2"),
        ("slo:\n  tbt_s: -1\n  longest_gap_s: -3\n", "slo.tbt_s: not negative; it is -1"),
        ("prefill:\n  engine:\n    dtype: int3\n", ":3: prefill.engine.dtype: one of auto, float32"),
        ("prefill: {engine: {block_size: 32}}", "decode.engine.block_size: equal to prefill.engine"),
        ("server: {host: 0.0.0.0}", "server.host: loopback, or set tls and keys_file, or insecure: true"),
        ("server: {tls: {cert: a.pem}}", "server.tls.key: set where cert is"),
        ("server: {tls: {cert: a.pem, key: b.pem}}", "nodes.tls.cert: set where server.tls.cert is"),
        ("nodes: {tls: {cert: a.pem, key: b.pem}}", "nodes.tls.ca: set where tls.cert is"),
        ("model: a\n\nmodel: b\n", ":3: the key 'model' stands here a second time"),
        ("server:\n  http_port: 1\n  http_port: 2\n", ":3: the key 'http_port' stands here a second time"),
        ("model: [\n", ":2: expected the node content"),
        ("model: !!python/object/apply:os.getcwd []\n", ":1: could not determine a constructor"),
        ("1: 2", ":1: 1 is no key"),
        ("? !!str [a]\n: 1", ":1: a table or list is no key"),
        ("? !!merge [a]\n: {a: 1}", ":1: a table or list is no key"),
        ("\nmodel: !!bool maybe\n", ":2: the value is no bool"),
        ("\nmodel: !!int ''\n", ":2: the value is no int"),
        pytest.param(f"slo: {{ttft_s: {'1:' * 300}1.0}}", ":1: the value is no float", id="in sixties"),
    ],
)
def test_what_is_wrong_is_told_with_file_line_and_key(tmp_path, text, told):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert told in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "cluster.yaml"))


def test_everything_wrong_is_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "modle: x\nserver: {http_port: -1}\ndecode: {nodes: many}\n")
    assert len(str(caught.value).splitlines()) == 3


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(ConfigError, match="No such file") as caught:
        read_cluster_config(tmp_path / "nowhere.yaml")
    assert str(caught.value).count("nowhere.yaml") == 1


def paths_of(table, prefix=()):
    for key, value in table.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths_of(value, (*prefix, key))


DEFAULTS = dataclasses.asdict(ClusterConfig())
ALL_PATHS = sorted(paths_of(DEFAULTS))


@given(path=st.sampled_from(ALL_PATHS), letters=st.text("abcxyz_", min_size=1, max_size=3))
def test_no_mistyped_key_passes(tmp_path_factory, path, letters):
    table = wrong = {}
    for part in path[:-1]:
        wrong[part] = {}
        wrong = wrong[part]
    wrong[f"{path[-1]}{letters}"] = 1
    file = tmp_path_factory.mktemp("config") / "cluster.yaml"
    file.write_text(json.dumps(table))
    with pytest.raises(ConfigError) as caught:
        read_cluster_config(file)
    assert ".".join((*path[:-1], path[-1] + letters)) + ": unknown key" in str(caught.value)
