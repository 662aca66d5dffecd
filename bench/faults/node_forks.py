"""Node processes at half a second each: forked from one that has imported what a node imports.

    python -m bench.faults.node_forks LIFELINE

Reads lines of JSON, `{"config": FILE, "log": FILE, "drain_s": SECONDS}`, and answers each with the pid
of a new process that runs `node.process` with that configuration and drains for so long at most.
Importing torch and transformers takes six seconds of a processor, which two hundred killed nodes would
pay two hundred times; nothing else differs from a node that was started by its supervisor. LIFELINE is a
pipe that nobody writes to: its end of file ends all nodes, as a supervisor's pipe does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import node.process


def _run_node(order: dict[str, Any], lifeline: int) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(lifeline, 0)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    node.process.DRAIN_S = order["drain_s"]
    sys.argv = ["node", "--config", order["config"]]
    # The fork has this process's: what it read ahead of its orders is not the node's.
    sys.stdin = os.fdopen(0)
    return node.process.main()


def main() -> None:
    lifeline = int(sys.argv[1])
    # The kernel buries the killed.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            # Not sys.exit: what this process would do at its end is not the node's to do.
            os._exit(_run_node(json.loads(line), lifeline))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
