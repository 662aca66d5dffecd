"""The traffic that a conductor remembers, and replays of it or of a trace, in a bounded process."""

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from base.config import ClusterConfig, SloConfig
from base.errors import InvalidRequestError, RejectedError
from base.request import RequestId, Role, Slo
from conductor.placing.decisions import Actual, decision
from conductor.placing.scheduler import place
from conductor.replay.arguments import service_arguments
from conductor.replay.trace_formats import read_trace
from conductor.serving import replays as module
from conductor.serving.replays import Replays, paces_of, slow_nodes
from conductor.serving.traffic import KEPT_S, Traffic, measured, trace_lines
from tests.conductor.builders import BLOCK_SIZE, make_cost, make_info, make_request, make_view
from tests.manual_clock import ManualClock

COST = make_cost()
VIEW = make_view(1, 1, COST)
ARGUMENTS = service_arguments(ClusterConfig(profile="a800-llama70b", slo=SloConfig(ttft_s=30.0, tbt_s=0.2)))
SAMPLE = Path("bench/traces/sample.jsonl")
ROWS = SAMPLE.read_text()


@pytest.fixture(autouse=True)
def as_urgent_as_other_tests(monkeypatch):
    """Let no replay wait for whatever else the host computes, which at the lowest priority is for ever."""
    monkeypatch.setattr(module, "LEAST_PRIORITY", 1)


def ask(traffic, name, at_s, blocks=3, tokens_more=0, num_new=7, first_block=0):
    chain = [(first_block + number).to_bytes(16, "little") for number in range(blocks)]
    request = make_request(f"{name}.1", blocks)
    request = replace(request, chain=chain, num_tokens=blocks * BLOCK_SIZE + tokens_more)
    result = place(request, VIEW, COST, at_s)
    traffic.decided(decision(request, VIEW, result, at_s, at_s))
    traffic.finished(RequestId(name), num_new, "stop" if num_new else "SloUnreachableError", "")


def test_what_was_asked_is_read_back_as_a_trace(tmp_path):
    clock = ManualClock()
    traffic = Traffic(clock)
    ask(traffic, "later", 12.5, tokens_more=5, num_new=9)
    ask(traffic, "first", 10.0, num_new=5)
    ask(traffic, "refused", 11.0, blocks=1, num_new=0, first_block=50)
    path = tmp_path / "hour.jsonl"
    path.write_text("".join(trace_lines(traffic.records(), BLOCK_SIZE)))
    trace = read_trace(path)
    rows = [(each.arrival_s, each.num_tokens, each.output_tokens, len(each.chain)) for each in trace.requests]
    assert rows == [
        (0.0, 3 * BLOCK_SIZE, 5, 3),
        (1.0, BLOCK_SIZE, 7, 1),
        (2.5, 3 * BLOCK_SIZE + 5, 9, 4),
    ], "of a refused one nobody knows what it would have been: the mean"
    assert trace.requests[0].chain[:3] == trace.requests[2].chain[:3]
    assert trace.block_size == BLOCK_SIZE


def test_a_request_of_any_numbers_is_kept():
    traffic = Traffic(ManualClock())
    for name, most, priority in (("a", 1 << 40, 1 << 40), ("b", 1, -(1 << 40))):
        request = replace(make_request(f"{name}.1", max_tokens=most), priority=priority)
        traffic.decided(decision(request, VIEW, place(request, VIEW, COST, 0.0), 0.0, 0.0))
        traffic.finished(RequestId(name), 1, "stop", "")
    assert len(list(trace_lines(traffic.records(), BLOCK_SIZE))) == 3


def test_requests_that_decode_nothing_or_count_on_no_cache_are_rows_like_others(tmp_path):
    traffic = Traffic(ManualClock())
    for at, (max_tokens, num_blocks, num_new) in enumerate([(0, 3, 0), (0, 0, 0), (300, 0, 7)]):
        request = make_request(f"r{at}.1", 3, max_tokens=max_tokens)
        request = replace(request, chain=request.chain[:num_blocks])
        traffic.decided(decision(request, VIEW, place(request, VIEW, COST, 0.0), float(at), float(at)))
        traffic.finished(RequestId(f"r{at}"), num_new, "stop", "")
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(trace_lines(traffic.records(), BLOCK_SIZE)))
    rows = read_trace(path).requests
    assert [(row.num_tokens, row.output_tokens, len(row.chain)) for row in rows] == [
        (3 * BLOCK_SIZE, 0, 3),
        (3 * BLOCK_SIZE, 0, 3),
        (3 * BLOCK_SIZE, 7, 3),
    ]
    assert not set(rows[1].chain) & {*rows[0].chain, *rows[2].chain}


async def test_a_trace_of_letters_that_are_none_is_refused():
    with pytest.raises(InvalidRequestError, match=r"dropped\.csv"):
        await replays_of().run("\ud800", ["1P1D"], [])


def test_traffic_takes_no_more_than_its_bytes_and_its_hour():
    clock = ManualClock()
    traffic = Traffic(clock, max_bytes=10_000)
    for number in range(500):
        ask(traffic, f"r{number}", float(number))
    assert len(traffic) == 10_000 // (len(traffic.records()[0]) + 64)
    assert len(traffic.records()[0]) == 41 + 3 * 8
    clock.advance(KEPT_S + 1_000.0)
    ask(traffic, "new", clock.now_s())
    assert len(traffic) == 1
    traffic.finished(RequestId("unknown"), 3, "stop", "")
    assert len(traffic) == 1, "one that was never placed is no traffic"


def serve(traffic, name, at_s, ttft_s, tbt_s, num_new=11, outcome="stop", attempts=1):
    """Ask and serve; of several attempts the first has the first token."""
    request = make_request(f"{name}.1", 4)
    traffic.decided(decision(request, VIEW, place(request, VIEW, COST, at_s), at_s, at_s))
    actual = Actual(0.0, "finished", ttft_s, 0.0, 0.5, 0.0, tbt_s, BLOCK_SIZE, num_new // attempts)
    traffic.ended(request.request_id, actual)
    for number in range(2, attempts + 1):
        traffic.ended(RequestId(f"{name}.{number}"), actual._replace(ttft_s=None))
    traffic.finished(RequestId(name), num_new, outcome, "")


def test_what_was_measured_is_judged_as_the_service_judges():
    clock = ManualClock()
    traffic = Traffic(clock)
    serve(traffic, "good", 0.0, 1.0, 0.1)
    serve(traffic, "late to begin", 1.0, 3.0, 0.1)
    serve(traffic, "slow", 2.0, 1.0, 0.3)
    serve(traffic, "one token", 3.0, 2.0, None, num_new=1, outcome="length")
    serve(traffic, "left", 3.0, 1.0, 0.1, outcome="cancelled")
    ask(traffic, "refused", 4.0, num_new=0)
    clock.advance(10.0 + 5.0 + 1.0)
    serve(traffic, "lost its node", 10.0, 1.0, 0.1, attempts=2)
    told = measured(traffic.records(), Slo(2.0, 0.25))
    assert (told["requests"], told["completed"], told["rejected"], told["failed"]) == (7, 5, 1, 1)
    assert told["served_within"] == 2 / 7, "the first and the one of one token"
    assert told["ttft_s"]["p50"] == 1.0
    assert told["mean_tbt_s"]["p99"] == pytest.approx(0.5), "5 s for ten more tokens, the pause included"
    assert told["hit_rate_tokens"] == pytest.approx(1 / 4)
    assert told["prefill_gpu_s_per_request"] == pytest.approx(0.5)
    assert measured(traffic.records(), Slo())["served_within"] == 5 / 7


def text_of(path):
    return path.read_text()


def replays_of(traffic=None, paces=dict, arguments=ARGUMENTS):
    return Replays(traffic or Traffic(ManualClock()), BLOCK_SIZE, arguments, paces)


async def test_a_trace_is_replayed_as_the_command_does(tmp_path):
    told = await replays_of().run(ROWS, ["2P2D", "1P1D"], ["--slo-ttft", "10"])
    assert told["measured"] is None, "nobody has measured a trace from elsewhere"
    assert [run["nodes"] for run in told["runs"]] == ["2P2D", "1P1D"]
    page = tmp_path / "page.html"
    command = [sys.executable, "-m", "bench.papers.command", str(SAMPLE), *ARGUMENTS, "--slo-ttft", "10"]
    command += ["--nodes", "2P2D", "--json", "--html", str(page)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True)
    [report] = json.loads(done.stdout)["runs"]
    timed = {"wall_s", "requests_per_s"}
    assert {key: value for key, value in told["runs"][0]["report"].items() if key not in timed} == {
        key: value for key, value in report.items() if key not in timed
    }
    assert told["runs"][0]["html"].replace("dropped.jsonl", SAMPLE.name) == text_of(page)


async def test_the_last_hour_is_replayed_where_no_trace_is_sent():
    traffic = Traffic(ManualClock())
    with pytest.raises(InvalidRequestError, match="last hour"):
        await replays_of(traffic).run("", ["1P1D"], [])
    for number in range(5):
        ask(traffic, f"r{number}", float(number), first_block=10 * number)
    # where roles follow the load a slow node is passed by
    fixed = [*ARGUMENTS, "--roles", "fixed"]
    measured_paces = replays_of(traffic, lambda: {"P": [3.0], "D": [1.1]}, fixed)
    told = await measured_paces.run("", ["1P1D", "2P1D"], [])
    slow, more = told["runs"]
    assert slow["slow_nodes"] == more["slow_nodes"] == {"p0": 3.0}
    told = await replays_of(traffic, arguments=fixed).run("", ["1P1D"], [], Slo(2.0, 0.25))
    assert told["runs"][0]["slow_nodes"] == {}
    prefill_s = [run["report"]["prefill_gpu_s_per_request"] for run in (slow, told["runs"][0])]
    assert prefill_s[0] == pytest.approx(3 * prefill_s[1], rel=0.01), "as slow as it was measured to be"
    assert told["runs"][0]["report"]["requests"] == told["measured"]["requests"] == 5
    assert {"ttft_s", "mean_tbt_s", "served_within", "hit_rate_tokens"} <= {*told["measured"]} & told["runs"][
        0
    ]["report"].keys(), "one name for one figure"


def test_slow_nodes_are_those_that_would_be_left_and_what_is_added_is_not_slow():
    paces = {"P": [3.0, 1.0, 2.0, 1.2], "D": [1.0], "C": [1.5]}
    assert slow_nodes("4P1D", paces) == {"p2": 2.0, "p3": 3.0}
    assert slow_nodes("5P2D1C", paces) == {"p2": 2.0, "p3": 3.0, "c0": 1.5}
    assert slow_nodes("3p1d", paces) == {"p2": 2.0}, "the slowest would have gone"
    assert slow_nodes("2C", {}) == {}


def test_paces_are_by_role_and_of_a_node_of_both_the_slower():
    view = make_view(2, 1, COST)
    view.add_node(make_info("c0", Role.PREFILL, Role.DECODE), 0.0)
    for _ in range(50):
        view.corrections.observe("p1", "prefill", 1.0, 3.0)
        view.corrections.observe("c0", "decode", 1.0, 2.0)
    paces = paces_of(view)
    assert paces["P"][0] == 1.0
    assert paces["P"][1] == pytest.approx(3.0, rel=0.1)
    assert paces["D"] == [1.0]
    assert paces["C"] == [pytest.approx(2.0, rel=0.1)]


@pytest.mark.parametrize(
    ("trace", "nodes", "words"),
    [
        ("{}", "1P1D", "dropped.jsonl"),
        ('{"timestamp": 1', "1P1D", "dropped.jsonl:1"),
        ("nothing\n", "1P1D", "dropped.csv"),
        ("x" * 200_000, "1P1D", "dropped.csv:1: no columns"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [0]}', "0P1D", "1P1D|8P8D"),
    ],
    # a test's name is in the environment of what it starts, which takes 128 KiB of each
    ids=["a brace", "no lengths", "a word", "a long word", "no prefill node"],
)
async def test_what_is_no_trace_is_refused_in_the_commands_words(trace, nodes, words):
    with pytest.raises(InvalidRequestError, match=words) as refused:
        await replays_of().run(trace, [nodes], [])
    assert "/tmp" not in str(refused.value)
    assert len(str(refused.value)) < 500


async def test_a_replay_past_its_processor_time_is_refused(monkeypatch):
    monkeypatch.setattr(module, "CPU_S", 1)
    with pytest.raises(InvalidRequestError, match="needs more than"):
        await replays_of().run(ROWS, ["1P1D"], ["--scale", "2000"])


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"Traceback (most recent call last):\nMemoryError",
        b"MemoryError\nException ignored in: Exception ignored in sys.unraisablehook",
        b"Exception ignored in: Exception ignored in sys.unraisablehook",
    ],
)
def test_a_replay_without_memory_left_says_what_it_needs(said, tmp_path):
    assert module._problem(said, 1, tmp_path / "dropped.csv").startswith("the replay needs more than")


async def test_a_replay_past_its_time_is_ended(monkeypatch):
    monkeypatch.setattr(module, "WALL_S", 0.0)
    with pytest.raises(InvalidRequestError, match="longer than"):
        await replays_of().run(ROWS, ["1P1D"], [])


async def test_the_folder_of_who_leaves_while_it_is_written_is_deleted_afterwards(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    loop, begun, may_write = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    write, had_folder = module._write, []

    def slowly(path, lines):
        loop.call_soon_threadsafe(begun.set)
        assert may_write.wait(60)
        had_folder.append(path.parent.exists())
        write(path, lines)

    monkeypatch.setattr(module, "_write", slowly)
    running = asyncio.create_task(replays_of().run(ROWS, ["1P1D"], []))
    await begun.wait()
    running.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    may_write.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert had_folder == [True]
    assert not list(tmp_path.iterdir())


async def test_one_runs_at_a_time_bounded_and_a_client_that_leaves_ends_it(monkeypatch):
    begun, pids = asyncio.Event(), []
    bound = module._bound

    def noted(pid):
        bound(pid)
        pids.append(pid)
        begun.set()

    monkeypatch.setattr(module, "_bound", noted)
    replays = replays_of()
    running = asyncio.create_task(replays.run(ROWS, ["1P1D"], []))
    await begun.wait()
    [pid] = pids
    assert resource.prlimit(pid, resource.RLIMIT_AS)[0] == module.MEMORY_BYTES
    assert os.getpriority(os.PRIO_PROCESS, pid) == module.LEAST_PRIORITY
    with pytest.raises(RejectedError, match="another"):
        await replays.run(ROWS, ["1P1D"], [])
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    told = await replays.run(ROWS, ["1P1D"], [])
    assert told["runs"][0]["report"]["requests"] > 0, "the next one may run"
