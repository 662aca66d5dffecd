"""`conductor up` with stub programs for the processes: run by tests, in a process of its own.

run_stub_cluster.py CLUSTER_YAML [--prompt TEXT] [--exit] [--json]
"""

import os
import sys
from pathlib import Path

from base.clock import SystemClock
from deploy import pools
from deploy.cluster import Programs
from deploy.config_file import read_cluster_config
from deploy.up import UpOptions, run

STUB = (sys.executable, str(Path(__file__).parent / "stub_process.py"))


def main():
    pools.NODE_DRAIN_S = float(os.environ.get("NODE_DRAIN_S", pools.NODE_DRAIN_S))
    arguments = sys.argv[2:]
    options = UpOptions(
        prompt=arguments[arguments.index("--prompt") + 1] if "--prompt" in arguments else "",
        leave="--exit" in arguments,
        machine="--json" in arguments,
    )
    programs = Programs((*STUB, "prepare"), (*STUB, "conductor"), (*STUB, "node"))
    file = Path(sys.argv[1])
    sys.exit(run(read_cluster_config(file), options, programs, SystemClock(), file))


if __name__ == "__main__":
    main()
