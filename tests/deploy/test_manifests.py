"""The manifests are what Ray, KubeRay and our own reader accept, checked offline."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from deploy.config_file import read_cluster_config

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
CRDS = ROOT.parent / "shared" / "kuberay"

needs_crds = pytest.mark.skipif(
    not CRDS.is_dir(), reason="KubeRay's resource definitions are not beside the checkout"
)


def documents(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def of_kind(path, kind):
    return [document for document in documents(path) if document["kind"] == kind]


# --- ray up ---


@pytest.fixture(scope="module")
def ray_cluster():
    return yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())


def test_ray_takes_the_cluster_file(ray_cluster):
    # as `ray up` does: the file, Ray's defaults filled in, its schema and its own validation
    from ray.autoscaler._private.util import prepare_config, validate_config  # noqa: PLC0415 - 1 s to import

    validate_config(prepare_config(ray_cluster))
    with pytest.raises(jsonschema.ValidationError, match="hed_start_ray_commands"):
        validate_config(prepare_config({**ray_cluster, "hed_start_ray_commands": []}))
    with pytest.raises(jsonschema.ValidationError, match="ssh_usr"):
        validate_config(prepare_config({**ray_cluster, "auth": {"ssh_usr": "x"}}))


def test_no_command_of_ours_is_ray_stop(ray_cluster):
    commands = [
        command for key, value in ray_cluster.items() if key.endswith("_commands") for command in value
    ]
    assert commands
    assert not [command for command in commands if "ray stop" in command]
    for path in [*DEPLOY.rglob("*.service"), *DEPLOY.rglob("*.yaml")]:
        code = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
        assert "ray stop" not in "\n".join(code), path


# --- KubeRay ---


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


@pytest.fixture(scope="module")
def ray_cluster_schema():
    crd = yaml.load((CRDS / "ray.io_rayclusters.yaml").read_text(), yaml.CSafeLoader)
    [version] = [item for item in crd["spec"]["versions"] if item["name"] == "v1"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


@needs_crds
@pytest.mark.parametrize("name", ["cluster.yaml", "gpu.yaml"])
def test_kuberays_definition_takes_the_ray_cluster(ray_cluster_schema, name):
    [cluster] = of_kind(DEPLOY / "kuberay" / name, "RayCluster")
    assert not list(ray_cluster_schema.iter_errors(cluster))


@needs_crds
def test_a_misspelt_key_deep_in_the_manifest_would_be_found(ray_cluster_schema):
    [cluster] = of_kind(DEPLOY / "kuberay" / "cluster.yaml", "RayCluster")
    cluster = json.loads(json.dumps(cluster))  # without the anchors' shared parts
    cluster["spec"]["workerGroupSpecs"][1]["template"]["spec"]["containers"][0]["imge"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="imge"):
        ray_cluster_schema.validate(cluster)


def test_each_pool_asks_for_what_its_worker_group_offers(tmp_path):
    path = DEPLOY / "kuberay" / "cluster.yaml"
    [config_map] = of_kind(path, "ConfigMap")
    file = tmp_path / "cluster.yaml"
    file.write_text(config_map["data"]["cluster.yaml"])
    config = read_cluster_config(file)
    [cluster] = of_kind(path, "RayCluster")
    offered = {
        group["groupName"]: json.loads(json.loads(group["rayStartParams"]["resources"]))
        for group in cluster["spec"]["workerGroupSpecs"]
    }
    assert offered == {"prefill": {config.prefill.resource: 1}, "decode": {config.decode.resource: 1}}


def test_the_gpu_configuration_can_be_read(tmp_path):
    [kustomization] = documents(DEPLOY / "kuberay" / "kustomization.yaml")
    [replace] = yaml.safe_load(kustomization["patches"][1]["patch"])
    file = tmp_path / "cluster.yaml"
    file.write_text(replace["value"])
    assert read_cluster_config(file).prefill.gpus_per_node == 1


def test_every_selector_of_the_manifests_finds_pods_that_there_are():
    path = DEPLOY / "kuberay" / "cluster.yaml"
    [cluster] = of_kind(path, "RayCluster")
    groups = {group["groupName"] for group in cluster["spec"]["workerGroupSpecs"]}
    for document in documents(path):
        for selector in re.findall(r'"ray.io/(cluster|group)": "([^"]+)"', json.dumps(document)):
            assert selector[1] in ({cluster["metadata"]["name"]} if selector[0] == "cluster" else groups)


# --- compose, systemd, shell ---


def test_compose_publishes_ports_on_loopback_alone():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name


def test_the_configuration_in_compose_can_be_read(tmp_path):
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    file = tmp_path / "cluster.yaml"
    file.write_text(compose["configs"]["cluster"]["content"])
    assert read_cluster_config(file).server.host == "0.0.0.0"


def test_what_compose_mounts_is_there():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert not source.startswith("./") or (DEPLOY / source).is_dir(), source
    assert (
        DEPLOY / compose["services"]["conductor"]["build"]["dockerfile"].removeprefix("deploy/")
    ).is_file()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
@pytest.mark.parametrize("unit", sorted(path.name for path in (DEPLOY / "systemd").iterdir()))
def test_systemd_takes_the_unit(unit, tmp_path):
    # the programs are not installed where the unit says: their place is replaced by one that is
    text = re.sub(
        r"ExecStart=\S+", f"ExecStart={shutil.which('true')}", (DEPLOY / "systemd" / unit).read_text()
    )
    (tmp_path / unit).write_text(text.replace("User=conductor", "User=root"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert unit not in done.stderr, done.stderr


def test_the_heads_shell_script_parses():
    [cluster] = of_kind(DEPLOY / "kuberay" / "cluster.yaml", "RayCluster")
    [container] = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    parsed = subprocess.run(
        ["bash", "-n", "-c", container["args"][0]], capture_output=True, timeout=10, check=False
    )
    assert parsed.returncode == 0, parsed.stderr


def test_the_image_runs_as_nobody_special():
    stages = re.split(r"^FROM ", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    users = {stage.split()[2]: re.findall(r"^USER (\S+)", stage, re.MULTILINE) for stage in stages}
    assert users["run"] == ["1000"]
    for target in ("cpu", "cuda"):
        [stage] = [stage for stage in stages if stage.splitlines()[0].endswith(f"AS {target}")]
        assert stage.startswith("run AS")
        assert "USER" not in stage
