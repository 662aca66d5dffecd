"""The manifests for Kubernetes: by KubeRay's schemas, by Ray's own readers, and their shell scripts by bash.

`cluster.yaml` is a RayCluster, `gpu.yaml` a patch of it, `service.yaml` a RayService.
"""

import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy.config_file import read_cluster_config

ROOT = Path(__file__).parent.parent.parent
KUBERAY = ROOT / "deploy" / "kuberay"
CRDS = ROOT.parent / "shared" / "kuberay"

needs_crds = pytest.mark.skipif(
    not CRDS.is_dir(), reason="KubeRay's resource definitions are not beside the checkout"
)
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed here")
MANIFESTS = ["cluster", "service", pytest.param("gpu", marks=needs_kubectl)]


@pytest.fixture(scope="module")
def manifests():
    """What is applied, by name: lists of resources."""

    def parsed(text):
        return [document for document in yaml.safe_load_all(text) if document]

    found = {name: parsed((KUBERAY / f"{name}.yaml").read_text()) for name in ("cluster", "service")}
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(KUBERAY)]
        built = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        found["gpu"] = parsed(built.stdout)
    return found


def one(manifest, kind):
    [found] = [document for document in manifest if document["kind"] == kind]
    return found


def cluster_spec(manifest):
    for document in manifest:
        if document["kind"] == "RayCluster":
            return document["spec"]
        if document["kind"] == "RayService":
            return document["spec"]["rayClusterConfig"]
    raise AssertionError("no Ray in it")


def groups(spec):
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def ray_container(group):
    [container] = group["template"]["spec"]["containers"]
    return container


# --- the schemas ---


def closed(schema):
    """A published CRD schema as JSON Schema: int-or-string as such, unknown keys refused."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


def validator(definition):
    crd = yaml.load((CRDS / definition).read_text(), yaml.CSafeLoader)
    [version] = [item for item in crd["spec"]["versions"] if item["name"] == "v1"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture(scope="module")
def validators():
    return {
        "RayCluster": validator("ray.io_rayclusters.yaml"),
        "RayService": validator("ray.io_rayservices.yaml"),
    }


@needs_crds
@pytest.mark.parametrize("name", MANIFESTS)
def test_kuberays_definition_takes_it_and_would_find_a_misspelt_key(validators, manifests, name):
    kind = "RayService" if name == "service" else "RayCluster"
    resource = json.loads(json.dumps(one(manifests[name], kind)))  # without the anchors' shared parts
    assert not list(validators[kind].iter_errors(resource))
    spec = resource["spec"]["rayClusterConfig"] if name == "service" else resource["spec"]
    ray_container(spec["workerGroupSpecs"][1])["imge"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="imge"):
        validators[kind].validate(resource)


KUBERNETES = "1.32"
OF_OPERATORS = {"RayCluster", "RayService", "ServiceMonitor", "PodMonitor"}
"""Kinds that Kubernetes itself does not know."""


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_takes_the_rest_and_the_pods(manifests, name):
    pods = [
        {"apiVersion": "v1", "kind": "Pod", **group["template"], "metadata": {"name": "pod"}}
        for group in groups(cluster_spec(manifests[name]))
    ]
    own = [document for document in manifests[name] if document["kind"] not in OF_OPERATORS]
    for document in [*own, *pods]:
        assert kubernetes_validate.validate(document, KUBERNETES, strict=True) == KUBERNETES
    pods[1]["spec"] = {**pods[1]["spec"], "tolerasions": []}
    with pytest.raises(kubernetes_validate.ValidationError, match="tolerasions"):
        kubernetes_validate.validate(pods[1], KUBERNETES, strict=True)


# --- what the parts say of each other ---


@pytest.mark.parametrize("name", MANIFESTS)
def test_each_pool_asks_for_what_its_worker_group_offers(manifests, name, tmp_path):
    # Ray's autoscaler reads the groups by this function, and starts pods for what waits
    from ray.autoscaler._private.kuberay import autoscaling_config  # noqa: PLC0415 - 1 s to import

    file = tmp_path / "cluster.yaml"
    file.write_text(one(manifests[name], "ConfigMap")["data"]["cluster.yaml"])
    config = read_cluster_config(file)
    resource = {"metadata": {"namespace": "n", "name": "c"}, "spec": cluster_spec(manifests[name])}
    derive = autoscaling_config._derive_autoscaling_config_from_ray_cr
    types = derive(resource)["available_node_types"]
    for pool, has in ((config.prefill, types["prefill"]), (config.decode, types["decode"])):
        assert has["resources"].get(pool.resource) == 1
        assert has["resources"].get("GPU", 0) == pool.gpus_per_node
        assert has["max_workers"] > has["min_workers"] == pool.nodes
    assert types["headgroup"]["resources"]["CPU"] == 0, "Ray would put nodes on the head"


@pytest.mark.parametrize("name", MANIFESTS)
def test_gpu_pods_have_their_devices_and_the_head_keeps_all_it_had(manifests, name):
    spec = cluster_spec(manifests[name])
    of_cpu = cluster_spec(manifests["cluster"])
    images = {ray_container(group)["image"] for group in groups(spec)}
    if name == "cluster":
        assert images == {"conductor-cluster:cpu"}
        return
    assert images == {"conductor-cluster:cuda"}
    for group in spec["workerGroupSpecs"]:
        limits = ray_container(group)["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == limits["rdma/hca_shared_devices_a"] == "1"
        assert "IPC_LOCK" in ray_container(group)["securityContext"]["capabilities"]["add"]
    if name == "gpu":
        told, image = dict(ray_container(spec["headGroupSpec"])), "conductor-cluster:cpu"
        assert {**told, "image": image} == ray_container(of_cpu["headGroupSpec"])


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_pod_is_probed_by_what_its_image_has_and_drains_before_it_ends(manifests, name):
    spec = cluster_spec(manifests[name])
    for group in groups(spec):
        container = ray_container(group)
        named = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("livenessProbe", "readinessProbe"):
            [how] = container[probe].keys() & {"httpGet", "tcpSocket", "exec"}
            assert how != "exec", "KubeRay's own call wget"
            assert container[probe][how]["port"] in {*named, 52365}
        grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s >= 90, "the conductor has 40 s, the nodes 40 s more"
    workers = [ray_container(group) for group in spec["workerGroupSpecs"]]
    for container in workers:
        program, dash_m, module = container["lifecycle"]["preStop"]["exec"]["command"]
        assert (program, dash_m) == ("python", "-m")
        assert importlib.util.find_spec(module)
        assert {"name": "node-metrics", "containerPort": 9464} in container["ports"]


def labels_of_pods(manifest):
    """The labels of each kind of pod, KubeRay's own included."""
    spec, name = cluster_spec(manifest), "conductor"
    own = [group["template"]["metadata"]["labels"] for group in groups(spec)]
    assert not any("app.kubernetes.io/name" in labels for labels in own), (
        "KubeRay's Service selects by its own"
    )
    kinds = ["head", *["worker"] * len(spec["workerGroupSpecs"])]
    named = ["headgroup", *(group["groupName"] for group in spec["workerGroupSpecs"])]
    return [
        {**labels, "ray.io/cluster": name, "ray.io/node-type": kind, "ray.io/group": group}
        for labels, kind, group in zip(own, kinds, named, strict=True)
    ]


@pytest.mark.parametrize("name", ["cluster", "service"])
def test_every_selector_finds_pods_that_there_are(manifests, name):
    pods = labels_of_pods(manifests[name])
    kinds = set()
    for document in manifests[name]:
        if document["kind"] in ("PodDisruptionBudget", "NetworkPolicy", "PodMonitor", "Service"):
            kinds.add(document["kind"])
            spec = document["spec"]
            selector = spec.get("podSelector") or spec["selector"]
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= labels.items() for labels in pods), document["metadata"]["name"]
    assert kinds >= {"PodDisruptionBudget", "NetworkPolicy", "PodMonitor"}
    assert one(manifests[name], "ServiceMonitor")
    groups_kept = [
        document["metadata"]["name"]
        for document in manifests[name]
        if document["kind"] == "PodDisruptionBudget"
    ]
    assert groups_kept == ["conductor-head", "conductor-prefill", "conductor-decode"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_nodes_are_scraped_as_the_job_that_rules_and_dashboards_name(manifests, name):
    """Without a label to take it from, the job of a PodMonitor begins with its namespace."""
    monitor = one(manifests[name], "PodMonitor")["spec"]
    assert re.fullmatch("conductor.*", monitor["selector"]["matchLabels"][monitor["jobLabel"]])
    assert 'job=~"conductor.*"' in (ROOT / "deploy" / "prometheus" / "rules.yml").read_text()


@pytest.mark.parametrize("name", ["cluster", "service"])
def test_prometheus_may_reach_every_port_that_it_is_sent_to(manifests, name):
    [allowed] = [
        {port["port"] for port in rule["ports"]}
        for rule in one(manifests[name], "NetworkPolicy")["spec"]["ingress"]
        if "conductor-monitoring" in json.dumps(rule)
    ]
    config = yaml.safe_load(one(manifests[name], "ConfigMap")["data"]["cluster.yaml"])
    assert allowed == {8000, config["nodes"]["metrics_port"]}


def test_ray_serve_takes_the_application():
    from ray.serve.schema import ServeDeploySchema  # noqa: PLC0415 - 2 s to import

    [service] = [
        document
        for document in yaml.safe_load_all((KUBERAY / "service.yaml").read_text())
        if document["kind"] == "RayService"
    ]
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    [application] = config.applications
    module, _, builder = application.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), builder))
    head = ray_container(service["spec"]["rayClusterConfig"]["headGroupSpec"])
    assert {"name": "serve", "containerPort": config.http_options.port} in head["ports"]


# --- the scripts ---

FAKES = {
    "ray": """
        printf '%s\\n' "$@" >> $FOLDER/ray-$1
        [ "$1" = health-check ] && exit 0
        trap 'echo ray >> $FOLDER/ended; kill $!; exit 0' TERM
    """,
    "conductor": """
        trap 'echo conductor >> $FOLDER/ended; kill $!; exit 0' TERM
    """,
}
WAIT = "sleep 600 > /dev/null 2>&1 & echo up > $FOLDER/up-${0##*/}; wait $!"
"""A write to a named pipe blocks until the test reads it: so the test knows that the trap is set."""


def run_script(folder, script, ray_start):
    """bash with that script, as KubeRay starts it, and stand-ins for its programs."""
    for name, body in FAKES.items():
        program = folder / name
        program.write_text(f"#!/bin/bash\n{body}\n{WAIT}\n")
        program.chmod(0o755)
        os.mkfifo(folder / f"up-{name}")
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "FOLDER": str(folder),
        "KUBERAY_GEN_RAY_START_CMD": ray_start,
    }
    return subprocess.Popen(["/bin/bash", "-c", script], env=environment, stderr=subprocess.PIPE)


def test_a_workers_script_hands_on_its_resources_in_one_piece(manifests, tmp_path):
    [worker, _] = cluster_spec(manifests["cluster"])["workerGroupSpecs"]
    # as KubeRay makes it (convertParamMap): the values as they are in the manifest
    ray_start = f"ray start  --block  --resources={worker['rayStartParams']['resources']} "
    started = run_script(tmp_path, ray_container(worker)["args"][0], ray_start)
    (tmp_path / "up-ray").read_text()
    assert (tmp_path / "ray-start").read_text().splitlines() == [
        "start",
        "--block",
        '--resources={"prefill": 1}',
    ]
    started.terminate()
    _, told = started.communicate(timeout=60)
    assert (tmp_path / "ended").read_text() == "ray\n", told


def test_the_heads_script_drains_the_cluster_before_it_ends_ray(manifests, tmp_path):
    head = cluster_spec(manifests["cluster"])["headGroupSpec"]
    started = run_script(tmp_path, ray_container(head)["args"][0], "ray start --head  --num-cpus=0  --block ")
    (tmp_path / "up-ray").read_text()
    (tmp_path / "up-conductor").read_text()
    started.send_signal(signal.SIGTERM)
    _, told = started.communicate(timeout=60)
    assert started.returncode == 0, told
    assert (tmp_path / "ended").read_text() == "conductor\nray\n"
    assert re.fullmatch(r"start\n--head\n--num-cpus=0\n--block\n", (tmp_path / "ray-start").read_text())
