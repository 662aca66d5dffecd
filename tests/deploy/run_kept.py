"""A command of `keep` whose driver supervises stubs without Ray: run by tests, in a process of its own.

run_kept.py FOLDER [HOW]: the driver reads words from the command's standard input. `lost` ends it as Ray
does, without a word; `done` in order. With HOW `early` it reads its own standard input to the end and then
does nothing but wait for a signal, before it has taken any; with `chatty` it writes to standard error, which
nobody may read, before it starts processes; with `littering` it starts a process of a session of its own
first, whose parent has died; with `stuck` it takes signals and does nothing about them, and is soon killed.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from base.clock import SystemClock
from deploy import keeper
from deploy.supervisor import ProcessSpec, Supervisor

STUB = (sys.executable, str(Path(__file__).parent / "stub_process.py"))
ORPHANING = ("sh", "-c", "trap '' TERM HUP; sleep 1000 & :")
CONFIGS = {
    "conductor": {"server": {"http_port": 0, "grpc_port": 0}},
    "prefill-0": {"node_id": "prefill-0"},
    "decode-0": {"node_id": "decode-0"},
}


def main():
    folder = Path(sys.argv[1])
    words = os.fdopen(os.dup(0))

    def drive(outlive):
        if "early" in sys.argv:
            print(f"early{sys.stdin.read()}", flush=True)
            signal.pause()
        if "chatty" in sys.argv:
            print("early", flush=True)
            words.readline()
            print("one line\n" * 100, file=sys.stderr, flush=True)

        if "littering" in sys.argv:
            subprocess.run(ORPHANING, start_new_session=True, stdout=subprocess.DEVNULL, check=True)

        def drain(*_):
            if "stuck" in sys.argv:
                return
            for supervisor in supervisors:
                supervisor.drain(30.0)
            raise SystemExit(0)

        supervisors = [
            Supervisor(
                ProcessSpec(name, (*STUB, name.partition("-")[0]), config, {}, str(folder)), SystemClock()
            )
            for name, config in CONFIGS.items()
        ]
        signal.signal(signal.SIGTERM, drain)
        if "stuck" in sys.argv:
            signal.signal(signal.SIGINT, drain)
        pids = [(supervisor.wait_ready(), supervisor.pid())[1] for supervisor in supervisors]
        outlive()
        print(*pids, flush=True)
        if words.readline() == "lost\n":
            os._exit(1)
        return 0

    if "stuck" in sys.argv:
        keeper.DRAIN_S = 0.01
    sys.exit(keeper.keep(drive, folder, SystemClock()))


if __name__ == "__main__":
    main()
