"""A cluster as an application of Ray Serve, so that KubeRay can run it as a RayService.

    import_path: deploy.serve_app:application
    args: {command: "conductor up --json -c /etc/conductor/cluster.yaml"}

Serve takes no part in serving here: each token would go through two more processes, and gRPC would end
at its proxy. The one replica of the one deployment, on the head, runs `conductor up` as a child: the
application is RUNNING when the cluster is, unhealthy when the command ended, and drained when it is deleted,
as a RayService needs to move clients from one cluster to the next. Clients find the conductor's own ports on
the head.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from typing import Any

from ray import serve

from deploy.launch import HEAD

DRAIN_S = 90.0
"""The longest end of the command: the conductor's drain, then the nodes'."""

HEALTH_PERIOD_S = 5.0


class RunningCluster:
    """The child, from its start to its end. The methods' names are Serve's."""

    def __init__(self, command: list[str]) -> None:
        """Return when the cluster serves; raises RuntimeError if the command ended before."""
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{shlex.join(command)} ended with status {self._process.wait()}")
        self._endpoints: dict[str, Any] = json.loads(line)

    async def __call__(self) -> dict[str, Any]:
        """Say where clients find the cluster."""
        return self._endpoints

    def check_health(self) -> None:
        status = self._process.poll()
        if status is not None:
            raise RuntimeError(f"`conductor up` ended with status {status}")

    def __del__(self) -> None:
        self._process.terminate()
        self._process.wait(DRAIN_S)


def application(args: dict[str, str]) -> Any:
    """Return the application; `args["command"]` starts a cluster and prints a line of JSON when it serves."""
    deployment = serve.deployment(
        RunningCluster,
        name="cluster",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "resources": HEAD},
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=DRAIN_S + HEALTH_PERIOD_S,
    )
    return deployment.bind(shlex.split(args["command"]))
