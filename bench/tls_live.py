"""What TLS costs a conductor's streams: tokens a second over HTTPS and over HTTP, in turns.

    python -m bench.tls_live [--rounds 16] [--streams 64] [--json bench/results/tls_live.json]

Two conductors as they are deployed, each with stub nodes that need 2 ms for a step (attached by
mutual TLS where there is TLS). The client is one process, on uvloop as the conductor is: it decrypts
on the same cores, and asyncio's own TLS, in Python, would be most of what is measured.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import uvloop

from base.config import ServerConfig
from bench.about_run import about_run, write_result
from bench.frontend import certificate, unchecked
from bench.frontend_live import HttpClient, quick_profile, streamed
from bench.stub_cluster import stub_cluster


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tls_live", description=__doc__)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        # authority, conductor and node in one: enough for a bench
        names = "subjectAltName=DNS:localhost,IP:127.0.0.1,URI:urn:conductor:node"
        made = certificate(folder, "-addext", names)
        secured = ServerConfig(tls=replace(made, ca=made.cert))
        clusters = {
            "plain": running.enter_context(stub_cluster(quick_profile(), 1, 1)),
            "tls": running.enter_context(stub_cluster(quick_profile(), 1, 1, secured)),
        }
        for streams in arguments.streams:
            for number in range(arguments.rounds):
                row: dict[str, float] = {}
                # Who is first takes turns too: a machine that is shared changes within a round.
                for name, cluster in list(clusters.items())[:: (1, -1)[number % 2]]:
                    # Its connections live on the event loop of the round.
                    client = HttpClient(cluster.http_port, unchecked() if name == "tls" else None)
                    tokens_per_s, us, _ = uvloop.run(streamed(client.ask, cluster.conductor_pid, streams))
                    row |= {f"{name}_tokens_per_s": round(tokens_per_s), f"{name}_us": round(us, 1)}
                row["ratio"] = round(row["tls_tokens_per_s"] / row["plain_tokens_per_s"], 3)
                found.setdefault(str(streams), []).append(row)
                print(streams, row, flush=True)
    medians = {streams: statistics.median(row["ratio"] for row in rows) for streams, rows in found.items()}
    print("median ratio by streams:", medians)
    table = {"about": about_run(), "median_ratio_by_streams": medians, "rounds": found}
    write_result(arguments.json, table)


if __name__ == "__main__":
    main()
