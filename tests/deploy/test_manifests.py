"""The files of `deploy/` are what Ray, systemd and our own reader accept, checked offline."""

import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import jsonschema
import pytest
import yaml

from deploy.config_file import read_cluster_config
from deploy.plan import HOST_ADDRESS, LocalModel, planned_nodes

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"

# --- ray up ---


@pytest.fixture(params=["ray-cluster.yaml", "ray-cluster-aws.yaml"])
def ray_cluster(request):
    return yaml.safe_load((DEPLOY / request.param).read_text())


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
    config = read_cluster_config(file)
    services = {"prometheus": config.server.prometheus, "redis": config.store.redis_url}
    for name, url in services.items():
        assert urlsplit(url).hostname == name in compose["services"]
    # what Prometheus, in another container, is told of the nodes is an address that leads there
    nodes = planned_nodes(config, LocalModel("/m", "m", "m"), (), 2)
    assert {node.process.metrics_host for node in nodes} == {HOST_ADDRESS}
    [scraped] = [
        target
        for job in yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
        if job["job_name"] == "conductor-cluster"
        for target in job["file_sd_configs"][0]["files"]
    ]
    mounts = [volume.split(":")[:2] for volume in compose["services"]["prometheus"]["volumes"]]
    folder, _, files = scraped.partition("/targets/")
    assert ["models", folder] in mounts
    assert files == "*.json", "file_sd takes a * in the last part alone"
    assert any(
        volume.startswith("models:") and volume.endswith(config.cache_dir.removeprefix("~"))
        for volume in compose["services"]["conductor"]["volumes"]
    )


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


def test_the_image_runs_as_nobody_special():
    stages = re.split(r"^FROM ", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    users = {stage.split()[2]: re.findall(r"^USER (\S+)", stage, re.MULTILINE) for stage in stages}
    assert users["run"] == ["1000"]
    for target in ("cpu", "cuda"):
        [stage] = [stage for stage in stages if stage.splitlines()[0].endswith(f"AS {target}")]
        assert stage.startswith("run AS")
        assert "USER" not in stage
