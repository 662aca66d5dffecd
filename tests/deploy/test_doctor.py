import dataclasses
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from base.config import GIB, ClusterConfig, EngineConfig, PoolConfig, ServerConfig, TransferConfig
from base.metrics import NodeMetrics, exposition, process_registry
from base.metrics_port import serve_metrics
from deploy import cli
from deploy.capacity import Offer
from deploy.clusters import claimed, described
from deploy.doctor import REQUIRED, Host, check_cluster, check_host
from deploy.doctor_processes import LinkSeen, ProcessSeen, check_processes, look_at_processes, measure_links

HEALTHY = Host(
    versions=dict.fromkeys(REQUIRED, "1"),
    open_files=65536,
    locked_memory_bytes=-1,
    offer=Offer(8 * GIB, 2),
    busy_ports=(),
    ray_token=True,
)
NODE = {
    "id": "n",
    "host": "h",
    "roles": ["prefill"],
    "transports": ["shm", "tcp"],
    "block_size": 64,
    "requests": 0,
}
SEVERAL_HOSTS = ClusterConfig(server=ServerConfig(host="0.0.0.0", insecure=True))
LARGE_CACHES = ClusterConfig(prefill=PoolConfig(nodes=3, engine=EngineConfig(kv_cache_gib=4.0)))
RDMA = ClusterConfig(transfer=TransferConfig(transports=("rdma", "tcp")))


def troubles(findings):
    return [(finding.level, finding.what, finding.mend) for finding in findings if finding.level != "ok"]


def test_a_healthy_host_has_no_troubles():
    assert troubles(check_host(HEALTHY, ClusterConfig())) == []


@pytest.mark.parametrize(
    ("change", "config", "level", "told"),
    [
        ({"versions": {}}, ClusterConfig(), "wrong", "torch is not installed"),
        ({"open_files": 1024}, ClusterConfig(), "warning", "1024 files"),
        ({"locked_memory_bytes": 65536}, RDMA, "wrong", "65536 bytes of memory"),
        ({"offer": Offer(2 * GIB, 2)}, ClusterConfig(), "wrong", "prefill: at most 1 more fit in 2.0 GiB"),
        ({}, LARGE_CACHES, "wrong", "each takes 4.9 GiB (weights 0.5, KV cache 4.0, process 0.4)"),
        ({"busy_ports": ("port 8000 is in use by x",)}, ClusterConfig(), "wrong", "port 8000"),
        ({"silent": (("store.redis_url", "h:1"),)}, ClusterConfig(), "wrong", "nobody answers at h:1"),
        ({"ray_token": False}, SEVERAL_HOSTS, "warning", "no Ray token"),
    ],
)
def test_a_trouble_of_the_host_is_told_with_its_mend(change, config, level, told):
    [first, *_] = troubles(check_host(dataclasses.replace(HEALTHY, **change), config))
    assert first[0] == level
    assert told in first[1]
    assert first[2]


def test_weights_in_the_hubs_cache_are_counted_by_its_name(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    config = tmp_path / "cluster.yaml"
    config.write_text(f"model: some/model\ncache_dir: {tmp_path}\n")
    uncounted = "memory was looked at without the weights of some/model"
    assert any(level == "warning" and uncounted in what for level, what in told_by(capsys, "-c", str(config)))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 20, 1 << 20]}}).encode()
    there = tmp_path / "hub/models--some--model"
    (there / "refs").mkdir(parents=True)
    (there / "refs/main").write_text("abc")
    (there / "snapshots/abc").mkdir(parents=True)
    (there / "snapshots/abc/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    found = told_by(capsys, "-c", str(config))
    assert any(level == "wrong" and "(weights 4096.0, KV" in what for level, what in found)
    assert not any(uncounted in what for _, what in found)


def test_what_nics_carry_each_memory_is_told_where_rdma_is_allowed():
    host = dataclasses.replace(HEALTHY, rails=("host memory: a (same NUMA node); b stand by",))
    told = "RDMA of host memory: a (same NUMA node); b stand by"
    assert told in [finding.what for finding in check_host(host, RDMA) if finding.level == "ok"]
    assert told not in [finding.what for finding in check_host(host, ClusterConfig())]


def test_a_cluster_that_runs_has_its_memory_and_its_ports_already():
    host = dataclasses.replace(HEALTHY, offer=Offer(0, 2), own="8000 (pid 1)")
    found = list(check_host(host, ClusterConfig()))
    assert troubles(found) == []
    assert "the cluster 8000 (pid 1) runs, and has its ports" in [finding.what for finding in found]


@pytest.mark.parametrize("with_file", [False, True])
def test_ports_of_the_running_cluster_are_its_own_and_those_of_another_are_not(
    with_file, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    mine, other = tmp_path / "mine.yaml", tmp_path / "other.yaml"
    for file in (mine, other):
        file.write_text("server: {grpc_port: 0}\n")
    with claimed(described(ClusterConfig(), mine if with_file else None, (8000, 50051))):
        found = told_by(capsys, *(["-c", str(mine)] if with_file else []))
        assert any(what.startswith("the cluster 8000 (pid") and level == "ok" for level, what in found)
        assert not [what for level, what in found if what.startswith("port ")]
        found = told_by(capsys, "-c", str(other))
        assert [
            level for level, what in found if what.startswith("port 8000 is that of the cluster 8000")
        ] == ["wrong"]


def told_by(capsys, *arguments):
    with pytest.raises(SystemExit):
        cli.main(["doctor", *arguments, "--json"])
    return [(item["level"], item["what"]) for item in json.loads(capsys.readouterr().out)]


def test_a_healthy_cluster_has_no_troubles():
    nodes = [NODE, {**NODE, "id": "m", "roles": ["decode"]}]
    assert troubles(check_cluster({"ready": True, "supervised": True, "nodes": nodes})) == []


def test_a_cluster_that_nobody_would_start_again_is_a_warning():
    nodes = [NODE, {**NODE, "id": "m", "roles": ["decode"]}]
    [(level, what, _)] = troubles(check_cluster({"ready": True, "supervised": False, "nodes": nodes}))
    assert (level, "nobody would start it again" in what) == ("warning", True)


@pytest.mark.parametrize(
    ("ready", "nodes", "level", "told"),
    [
        (False, [NODE], "wrong", "no node serves"),
        (True, [NODE, {**NODE, "id": "m", "block_size": 32}], "wrong", "block sizes differ"),
        (True, [NODE, {**NODE, "id": "m", "transports": ["rdma"]}], "wrong", "no transport"),
        (True, [{**NODE, "transports": ["tcp"]}] * 2, "warning", "tcp alone"),
        (True, [{**NODE, "held_blocks": 3, "running": 0}], "warning", "holds 3 blocks"),
    ],
)
def test_a_trouble_of_the_cluster_is_told_with_its_mend(ready, nodes, level, told):
    [(found, what, mend)] = troubles(check_cluster({"ready": ready, "supervised": True, "nodes": nodes}))
    assert found == level
    assert told in what
    assert mend


def test_the_command_looks_at_this_host_and_fails_for_a_cluster_that_is_not_there(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", "--json", "--address", "127.0.0.1:1"])
    assert caught.value.code == 1
    findings = json.loads(capsys.readouterr().out)
    assert [item["what"] for item in findings if item["level"] == "wrong"][-1].startswith(
        "http://127.0.0.1:1/"
    )
    assert {"torch", "ray"} <= {item["what"].split()[0] for item in findings if item["level"] == "ok"}


def test_a_configuration_that_cannot_be_read_is_a_finding(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("modle: x\n")
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", "-c", str(file)])
    assert caught.value.code == 1
    assert "did you mean model?" in capsys.readouterr().out


def test_a_profile_that_nobody_knows_is_a_finding_and_the_rest_of_the_file_is_read(tmp_path, capsys):
    file = tmp_path / "cluster.yaml"
    file.write_text(f"profile: h200\ncache_dir: {tmp_path}\nstore: {{redis_url: 'redis://127.0.0.1:1'}}\n")
    with pytest.raises(SystemExit):
        cli.main(["doctor", "-c", str(file)])
    said = capsys.readouterr().out
    assert "✗ profile 'h200': no such file" in said
    assert "store.redis_url: nobody answers" in said


def test_services_that_are_named_are_called(tmp_path, capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as redis:
        port = redis.getsockname()[1]
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        file = tmp_path / "c.yaml"
        file.write_text(f"store: {{redis_url: redis://127.0.0.1:{port}, peers: ['127.0.0.1:2']}}\n")
        with pytest.raises(SystemExit):
            cli.main(["doctor", "-c", str(file), "--json"])
    wrong = [item["what"] for item in json.loads(capsys.readouterr().out) if item["level"] == "wrong"]
    assert [what for what in wrong if "nobody answers" in what] == [
        "store.peers: nobody answers at 127.0.0.1:2",
        "RAY_ADDRESS: nobody answers at 127.0.0.1:1",
    ]


VERSIONS = (("torch", "2"), ("version", "1"))
PAIR = {
    "nodes": [
        {**NODE, "id": "p", "roles": ["prefill"]},
        {**NODE, "id": "d", "roles": ["decode"]},
    ]
}


def seen(name, **told):
    return ProcessSeen(name, **{"versions": VERSIONS, **told})


def test_processes_that_agree_have_no_troubles_and_their_links_are_told():
    prefill = seen("p", links=(LinkSeen("d", "shm", 3e9),))
    found = list(check_processes([seen("conductor", offset_s=0.2), prefill, seen("d")], PAIR))
    assert troubles(found) == []
    told = [finding.what for finding in found]
    assert "p - d: shm, 3 GB/s when it was last used" in told
    assert "all processes have torch 2" in told
    assert any("at most, conductor's clock is +0.200 s" in what for what in told)


def test_a_pair_that_moved_nothing_yet_is_named():
    found = [finding.what for finding in check_processes([seen("p"), seen("d")], PAIR)]
    assert "p - d: nothing of a MiB or more went between them yet" in found


@pytest.mark.parametrize(
    ("process", "level", "told"),
    [
        (seen("p", silent="refused"), "wrong", "p does not answer: refused"),
        (seen("new"), "wrong", "new runs, and the conductor does not know it"),
        (seen("p", versions=(("torch", "3"), ("version", "1"))), "wrong", "torch differs (2: d; 3: p)"),
        (seen("p", offset_s=-3.0, unsure_s=0.1), "warning", "p's clock is -3.000 s"),
        (
            seen("p", links=(LinkSeen("d", "tcp", 1e9),)),
            "warning",
            "p - d: tcp, 1 GB/s, though both offer shm",
        ),
    ],
)
def test_a_trouble_of_a_process_is_told_with_its_mend(process, level, told):
    [(found, what, mend)] = troubles(check_processes([process, seen("d")], PAIR))
    assert found == level
    assert told in what
    assert mend


@pytest.mark.parametrize(
    ("by", "other_host", "offered", "told"),
    [
        ("tcp", "h", ["tcp"], "on one host"),
        ("tcp", "h", ["rdma", "shm", "tcp"], "though both offer rdma, shm"),
        ("tcp", "far", ["rdma", "shm", "tcp"], "though both offer rdma"),
        ("tcp", "far", ["shm", "tcp"], "when it was last used"),
        ("staged_tcp", "h", ["cuda_ipc", "shm", "tcp"], "though both offer cuda_ipc"),
        ("staged_tcp", "h", ["shm", "tcp"], "on one host"),
        ("staged_tcp", "far", ["cuda_ipc", "tcp"], "when it was last used"),
    ],
)
def test_a_link_over_tcp_where_both_offer_something_faster_is_told(by, other_host, offered, told):
    ends = zip(PAIR["nodes"], ("h", other_host), strict=True)
    nodes = [{**node, "host": host, "transports": offered} for node, host in ends]
    process = seen("p", links=(LinkSeen("d", by, 1e9),))
    found = [finding.what for finding in check_processes([process, seen("d")], {"nodes": nodes})]
    assert f"p - d: {by}, 1 GB/s{'' if told.startswith('when') else ','} {told}" in found


def test_a_link_far_below_its_like_is_worth_a_look():
    rates = {"d": 10e9, "e": 9e9, "f": 1e9}
    links = tuple(LinkSeen(peer, "rdma", rate) for peer, rate in rates.items())
    nodes = [*PAIR["nodes"], {**NODE, "id": "e", "roles": []}, {**NODE, "id": "f", "roles": []}]
    [(level, what, mend)] = troubles(
        check_processes([seen("p", links=links), *map(seen, "def")], {"nodes": nodes})
    )
    assert level == "warning"
    assert what == "p - f: rdma, 1 GB/s; the median of its transport is 9"
    assert mend


@pytest.fixture
def conductor_that_says(request):
    """A stand-in for the conductor: what it was asked, and its address. The parameter is what it answers."""
    asked = []

    class Answers(BaseHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

        def do_GET(self):
            asked.append(self.path)
            body = json.dumps(request.param).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield asked, f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


BOTH = {"nodes": [*PAIR["nodes"], {**NODE, "id": "b", "roles": ["prefill", "decode"]}]}


@pytest.mark.parametrize("conductor_that_says", [{"blocks": 8, "problem": ""}], indirect=True)
def test_kv_is_sent_from_each_prefill_node_to_each_other_decode_node(conductor_that_says):
    asked, address = conductor_that_says
    assert list(measure_links(address, BOTH)) == []
    assert asked == ["/v1/links/p,d", "/v1/links/p,b", "/v1/links/b,d"]


@pytest.mark.parametrize("conductor_that_says", [{"blocks": 0, "problem": "LostError: cut"}], indirect=True)
def test_a_pair_without_a_way_is_wrong_and_says_where_to_look(conductor_that_says):
    _, address = conductor_that_says
    [(level, what, mend)] = troubles(measure_links(address, PAIR))
    assert level == "wrong"
    assert what == "p - d: no KV goes there: LostError: cut"
    assert "p.log" in mend


def test_an_offset_that_a_slow_answer_explains_is_none():
    assert troubles(check_processes([seen("p", offset_s=2.0, unsure_s=2.0), seen("d")], PAIR)) == []


def write_targets_file(cache_dir, text):
    (cache_dir / "targets").mkdir()
    (cache_dir / "targets" / "8000.json").write_text(text)


@pytest.mark.parametrize("targets", [None, "{", "[]", '[{"labels": {}}]', '[{"targets": ["other:1"]}]'])
def test_where_nothing_says_where_the_processes_are_that_is_a_finding(targets, tmp_path):
    if targets is not None:
        write_targets_file(tmp_path, targets)
    found = look_at_processes(ClusterConfig(cache_dir=str(tmp_path)), "127.0.0.1:8000")
    assert found is None
    [(level, _, mend)] = troubles(check_processes(found, PAIR))
    assert level == "warning"
    assert "conductor up" in mend


def test_a_process_is_asked_for_what_its_metrics_say(tmp_path):
    registry = process_registry()
    metrics = NodeMetrics(registry)
    metrics.transfer_link.labels("d", "shm").set(5e9)
    port = serve_metrics(lambda: exposition(registry), "127.0.0.1", 0)
    targets = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"process": "p", "__scheme__": "http"}},
        {"targets": ["127.0.0.1:1"], "labels": {"process": "gone"}},
    ]
    write_targets_file(tmp_path, json.dumps(targets))
    found, gone = look_at_processes(ClusterConfig(cache_dir=str(tmp_path)), f"http://127.0.0.1:{port}")
    assert found.links == (LinkSeen("d", "shm", 5e9),)
    assert {"version", "torch"} <= dict(found.versions).keys()
    assert abs(found.offset_s) <= found.unsure_s + 1e-3, "a process on this host has this host's clock"
    assert gone.silent
