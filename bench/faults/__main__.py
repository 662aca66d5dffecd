"""Measure rows of the fault matrix and write them down, one by one.

    python -m bench.faults [--times N] [--json bench/results/faults.json] [ROW...]

Without rows: all. A row that was measured before is replaced in the file by its new figures; the others stay.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.about_run import about_run
from bench.faults.bereft import conductor_hung, gcs_killed, raylet_killed, spare_killed, supervisor_killed
from bench.faults.cluster import pretty
from bench.faults.drifts import roles_drift
from bench.faults.hostile import hostile_bytes
from bench.faults.kills import decode_ended, decode_killed, decode_stopped, prefill_killed, prefill_stopped
from bench.faults.leaving import clients_leave
from bench.faults.published import conductor_killed, conductor_twice, decode_killed_of_800, rolling_restart
from bench.faults.redis_gone import redis_gone
from bench.faults.restart import conductor_restarts
from bench.faults.soak import soak
from bench.faults.standing import conductor_stopped
from bench.faults.tenants import tenants_timing
from bench.faults.transfers import transfers_hurt

ROWS: dict[str, tuple[Callable[[int], Any], int]] = {
    "prefill-killed": (prefill_killed, 200),
    "decode-killed": (decode_killed, 200),
    "prefill-stopped": (prefill_stopped, 20),
    "decode-stopped": (decode_stopped, 20),
    "decode-ended": (decode_ended, 100),
    "client-leaves": (clients_leave, 200),
    "conductor-killed": (conductor_killed, 5),
    "conductor-stopped": (conductor_stopped, 2),
    "conductor-hung": (conductor_hung, 2),
    "conductor-restarts": (conductor_restarts, 3),
    "supervisor-killed": (supervisor_killed, 20),
    "spare-killed": (spare_killed, 20),
    "raylet-killed": (raylet_killed, 20),
    "gcs-killed": (gcs_killed, 20),
    "decode-killed-of-800": (decode_killed_of_800, 3),
    "conductor-twice": (conductor_twice, 1),
    "rolling-restart": (rolling_restart, 2),
    "redis-gone": (redis_gone, 600),
    "soak": (soak, 100_000),
    "roles-drift": (roles_drift, 100),
    "tenants-timing": (tenants_timing, 200),
    "hostile-bytes": (hostile_bytes, 10_000),
    "transfers-hurt": (transfers_hurt, 1_000_000),
}
"""How a row is measured, and how many faults it injects unless the command line says otherwise."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], help=f"of {', '.join(ROWS)}")
    parser.add_argument("--times", "--count", dest="count", type=int, help="faults to inject")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    for name in arguments.rows or ROWS:
        measure, usual = ROWS[name]
        begin_s = time.monotonic()
        result = measure(arguments.count or usual)
        row = {**result, "took_s": round(time.monotonic() - begin_s, 1), "about": about_run()}
        print(name, pretty(row), flush=True)
        if arguments.json:
            table = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
            arguments.json.write_text(pretty(table | {name: row}))


if __name__ == "__main__":
    main()
