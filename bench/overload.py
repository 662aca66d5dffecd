"""What ten times too much load does to one conductor: goodput, TTFT of what is accepted, rejections.

    python -m bench.overload [--overload-s 60] [--json bench/results/overload.json]

Three processes: `python -m conductor` as it is deployed, two prefill and two decode stub
nodes (`stub_cluster.py`) that take a profile's time, and an open-loop HTTP client
(`overload_client.py`). First rates around the nodes' capacity, for the peak of goodput; then ten
times the capacity; then 0.7 times, for the return to normal. Every request has the same bounds on
TTFT and TBT. Goodput is requests a second that ended well within both.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import random
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from base.metrics import samples_of
from base.request import Slo
from bench.about_run import about_run, write_result
from bench.frontend import cpu_seconds
from bench.frontend_live import stolen_seconds
from bench.overload_client import Client
from bench.stub_cluster import StubCluster, stub_cluster
from conductor.placing.profile import Profile
from conductor.profiles.reader import load_profile
from deploy.api_client import read_text

PROMPT_TOKENS = 200
MAX_TOKENS = 16
NODES_OF_A_ROLE = 2
CAPACITY = 30.0
"""Requests a second that the prefill nodes compute, by their profile."""
SLO = Slo(ttft_slo_s=0.5, tbt_slo_s=0.05)
OK, REJECTED = 200, 429
ANSWER_S = 30.0
"""Seconds that a whole answer may take."""
WARM_UP_S = 2.0
"""Seconds of each stretch of load that are left out of its figures but for the return to normal."""


def stub_profile() -> Profile:
    """Return a profile under which the nodes have CAPACITY."""
    profile = load_profile("cpu-smollm2")
    prefill_s = NODES_OF_A_ROLE / CAPACITY
    return dataclasses.replace(
        profile,
        name="stub",
        source="made up, for bench.overload",
        prefill_fixed_s=prefill_s / 10,
        prefill_token_s=prefill_s * 0.9 / PROMPT_TOKENS,
        prefill_token2_s=0.0,
        decode_fixed_s=0.01,
        decode_sequence_s=0.0005,
        decode_context_token_s=0.0,
        transfer_fixed_s=0.0,
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """How one request went. Seconds on the client's clock."""

    at_s: float
    rejected_after_s: float | None = None
    ttft_s: float | None = None
    tbt_s: float | None = None
    """The mean."""
    is_whole: bool = False
    said: str = ""
    """What one that failed ended with."""

    @property
    def is_good(self) -> bool:
        met = self.ttft_s is not None and self.ttft_s <= SLO.ttft_slo_s
        return self.is_whole and met and (self.tbt_s or 0.0) <= SLO.tbt_slo_s


@dataclass(frozen=True, slots=True)
class Stretch:
    """One stretch of load at one rate."""

    rate: float
    seconds: float
    asked: int
    goodput: float
    accepted_p99_ttft_s: float
    rejected: int
    rejection_p50_s: float
    rejection_p99_s: float
    failed: int
    failures: list[str]
    """The first few."""


def summary(rate: float, seconds: float, asked: Iterable[Asked], skip_s: float) -> Stretch:
    """Return the figures of a stretch without its first `skip_s`, by when requests were asked."""
    rows = [row for row in asked if row.at_s >= skip_s]
    ttft = [row.ttft_s for row in rows if row.ttft_s is not None]
    failures = [row.said for row in rows if not row.is_whole and row.rejected_after_s is None]
    rejections = [row.rejected_after_s for row in rows if row.rejected_after_s is not None]
    return Stretch(
        rate=rate,
        seconds=seconds,
        asked=len(rows),
        goodput=sum(row.is_good for row in rows) / (seconds - skip_s),
        accepted_p99_ttft_s=quantile(ttft, 0.99),
        rejected=len(rejections),
        rejection_p50_s=quantile(rejections, 0.5),
        rejection_p99_s=quantile(rejections, 0.99),
        failed=len(failures),
        failures=failures[:3],
    )


def quantile(values: list[float], share: float) -> float:
    """Return the value below which `share` of `values` lie; 0 where there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def normal_after_s(rows: Iterable[Asked]) -> float:
    """Return from when on, in a stretch below capacity, all went well in every 2 s but for one in twenty."""
    rows = list(rows)
    bad_until_s = 0.0
    for first in rows:
        window = [row for row in rows if first.at_s <= row.at_s < first.at_s + 2.0]
        if sum(row.is_good for row in window) < 0.95 * len(window) - 1:
            bad_until_s = window[-1].at_s
    return bad_until_s


# --- the client -------------------------------------------------------------------------


async def ask(client: Client, at_s: float) -> Asked:
    call = await client.ask(ANSWER_S)
    if call.status == REJECTED:
        return Asked(at_s, rejected_after_s=call.first_at_s - call.sent_at_s)
    if call.status != OK:
        return Asked(at_s, said=f"{call.status} {call.said[-200:].decode()}")
    ttft_s = call.first_at_s - call.sent_at_s
    if not call.is_whole:
        return Asked(at_s, ttft_s=ttft_s, said=call.said[-200:].decode())
    return Asked(at_s, None, ttft_s, (call.last_at_s - call.first_at_s) / (MAX_TOKENS - 1), True)


async def stretch(client: Client, rate: float, seconds: float, rng: random.Random) -> list[Asked]:
    """Send an open loop of requests; return how each went, when all are over."""
    begin_s = time.monotonic()
    due_s = 0.0
    async with asyncio.TaskGroup() as group:
        tasks = []
        while (due_s := due_s + rng.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, begin_s + due_s - time.monotonic()))
            tasks.append(group.create_task(ask(client, time.monotonic() - begin_s)))
    return [task.result() for task in tasks]


def rejections_within(http_port: int) -> dict[str, float]:
    """Return shares of all rejections by what the conductor itself took, by bound in seconds."""
    samples = samples_of(read_text(f"127.0.0.1:{http_port}", "/metrics"))
    found = {
        labels["le"]: value for name, labels, value in samples if name == "conductor_rejection_seconds_bucket"
    }
    count = max(1.0, found.get("+Inf", 0.0))
    return {bound: value / count for bound, value in found.items()}


async def measure(cluster: StubCluster, overload_s: float) -> dict[str, Any]:
    rng = random.Random(1)
    with closing(Client(cluster.http_port, PROMPT_TOKENS, MAX_TOKENS, SLO)) as client:
        await stretch(client, CAPACITY / 2, 3.0, rng)
        sweep = []
        for share in (0.8, 1.0, 1.2):
            rows = await stretch(client, CAPACITY * share, 8.0, rng)
            sweep.append(shown(summary(CAPACITY * share, 8.0, rows, WARM_UP_S)))
        peak = max(each.goodput for each in sweep)
        cpu_s, own_s = cpu_seconds(cluster.conductor_pid), time.process_time()
        taken_s = stolen_seconds()
        rows = await stretch(client, CAPACITY * 10, overload_s, rng)
        cpu_s = cpu_seconds(cluster.conductor_pid) - cpu_s
        own_s, taken_s = time.process_time() - own_s, stolen_seconds() - taken_s
        overload = shown(summary(CAPACITY * 10, overload_s, rows, WARM_UP_S))
        after = await stretch(client, CAPACITY * 0.7, 12.0, rng)
        shown(summary(CAPACITY * 0.7, 12.0, after, 0.0))
    result = {
        "peak_goodput": peak,
        "overload_goodput_over_peak": overload.goodput / peak,
        "accepted_p99_ttft_s": overload.accepted_p99_ttft_s,
        "ttft_slo_s": SLO.ttft_slo_s,
        "rejection_p99_s": overload.rejection_p99_s,
        "normal_after_s": normal_after_s(after),
        "conductor_cpu_ms_per_request": cpu_s / max(1, len(rows)) * 1e3,
        "conductor_cpu_share_of_a_core": cpu_s / overload_s,
        "client_cpu_ms_per_request": own_s / max(1, len(rows)) * 1e3,
        "share_of_the_cores_taken_by_other_machines": taken_s / overload_s / (os.cpu_count() or 1),
    }
    for name, value in result.items():
        print(f"{name}: {value:.4g}")
    within = rejections_within(cluster.http_port)
    print(f"rejections by the conductor's own time: {within}")
    return {
        **result,
        "rejections_within_s_of_arrival": within,
        "sweep": [asdict(each) for each in sweep],
        "overload": asdict(overload),
    }


def shown(figures: Stretch) -> Stretch:
    print(
        f"rate {figures.rate:6.1f}/s  goodput {figures.goodput:6.2f}/s"
        f"  accepted p99 TTFT {figures.accepted_p99_ttft_s * 1e3:6.0f} ms"
        f"  rejected {figures.rejected:6d}, p50 {figures.rejection_p50_s * 1e3:5.1f}"
        f" p99 {figures.rejection_p99_s * 1e3:6.1f} ms  failed {figures.failed} {figures.failures}",
        flush=True,
    )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overload", description=__doc__)
    parser.add_argument("--overload-s", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    about = about_run()
    with stub_cluster(stub_profile(), NODES_OF_A_ROLE, NODES_OF_A_ROLE) as cluster:
        result = uvloop.run(measure(cluster, arguments.overload_s))
    write_result(arguments.json, {"about": about, **result})


if __name__ == "__main__":
    main()
