"""The load generator, against a server of known behaviour."""

import asyncio
import gzip
import json
import random
import statistics
from contextlib import asynccontextmanager
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load import LoadRun, run_load
from bench.load_command import main, make_parser
from bench.load_report import Goodput, parse_goodput, report, table
from bench.profile_command import make_parser as profile_parser
from bench.sse_client import Outcome, Server, complete
from bench.workload import (
    LoadRequest,
    gamma_arrivals,
    num_turns,
    sessions,
    synthetic_load,
    trace_at,
    trace_load,
)
from conductor.replay.trace_formats import read_trace

# --- workloads ---


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(burstiness):
    times = list(islice(gamma_arrivals(5.0, burstiness, random.Random(1)), 20_001))
    gaps = [later - sooner for sooner, later in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    # of a gamma distribution the squared deviation over the squared mean is 1 / shape
    assert statistics.variance(gaps) / statistics.fmean(gaps) ** 2 == pytest.approx(1 / burstiness, rel=0.15)


def test_an_infinite_rate_sends_everything_at_once():
    assert set(islice(gamma_arrivals(float("inf"), 1.0, random.Random(1)), 10)) == {0.0}


def test_synthetic_prompts_share_exactly_the_prefix():
    rng = random.Random(3)
    first, second = synthetic_load(2, gamma_arrivals(1.0, 1.0, rng), 100, 7, 40, rng)
    assert len(first.token_ids) == len(second.token_ids) == 100
    assert first.token_ids[:40] == second.token_ids[:40]
    assert first.token_ids[40:] != second.token_ids[40:]


rows = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(1, 200), st.integers(1, 50), st.integers(0, 3)),
    min_size=1,
    max_size=8,
)


@given(rows=rows, block_tokens=st.sampled_from([None, 1, 4, 64]))
def test_a_traces_prompts_share_what_their_ids_share(tmp_path_factory, rows, block_tokens):
    block_size = 16
    file = tmp_path_factory.mktemp("trace") / "t.jsonl"
    written = []
    for at_ms, length, output, family in rows:
        chain = [family * 1000 + n for n in range(-(-length // block_size))]
        written.append(
            {"timestamp": at_ms, "input_length": length, "output_length": output, "hash_ids": chain}
        )
    file.write_text("\n".join(map(json.dumps, [{"block_size": block_size}, *written])))
    trace = read_trace(file)
    load = list(trace_load(trace, 2.0, None, block_tokens))
    stride = block_tokens or block_size
    for row, request in zip(trace.requests, load, strict=True):
        assert request.at_s == row.arrival_s / 2
        assert -(-len(request.token_ids) // stride) == len(row.chain)
        if block_tokens is None:
            assert (len(request.token_ids), request.output_tokens) == (row.num_tokens, row.output_tokens)
    for (a, load_a), (b, load_b) in pairwise(zip(trace.requests, load, strict=True)):
        shared = sum(x == y for x, y in zip(a.chain, b.chain, strict=False))
        whole = min(shared * stride, len(load_a.token_ids), len(load_b.token_ids))
        assert load_a.token_ids[:whole] == load_b.token_ids[:whole]
        if not shared:
            assert load_a.token_ids[:1] != load_b.token_ids[:1] or stride == 1


def chained(request):
    return [] if request is None else [request, *chained(request.next_turn)]


def test_each_turn_of_a_session_has_the_one_before_it_for_a_prefix():
    rng = random.Random(3)
    first = synthetic_load(2, gamma_arrivals(1.0, 1.0, rng), 20, 7, 5, rng)
    for at, session in enumerate(sessions(first, 3, 0.5, rng)):
        turns = chained(session)
        assert num_turns(session) == 3
        assert [turn.at_s for turn in turns[1:]] == [0.5, 0.5]
        assert (session.at_s > 0) == (at > 0)
        assert [len(turn.token_ids) for turn in turns] == [20, 47, 74]
        for sooner, later in pairwise(turns):
            assert later.token_ids[: len(sooner.token_ids)] == sooner.token_ids


def test_the_sessions_of_a_trace_are_rebuilt(tmp_path):
    file = tmp_path / "t.jsonl"
    rows = [
        {"session_id": "s", "timestamp": 1000, "input_length": 20, "output_length": 3, "hash_ids": [1, 2]},
        {"session_id": "s", "delay_ms": 400, "input_length": 40, "output_length": 4, "hash_ids": [1, 3, 4]},
    ]
    file.write_text("\n".join(map(json.dumps, [{"block_size": 16}, *rows])))
    [session] = trace_load(read_trace(file), 2.0, None, None)
    first, second = chained(session)
    assert (len(first.token_ids), len(second.token_ids)) == (20, 40)
    assert second.at_s == 0.2
    assert first.token_ids[:16] == second.token_ids[:16]
    assert first.token_ids[16:20] != second.token_ids[16:20]


# --- a server of known behaviour ---


@asynccontextmanager
async def server_that(answer):
    """An HTTP server on loopback; `answer(body)` yields bytes, or floats: seconds to wait."""
    now = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        now.append(1)
        try:
            async for piece in answer(json.loads(await reader.readexactly(length)), len(now)):
                writer.write(piece)
                await writer.drain()
        finally:
            now.pop()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Server(f"http://127.0.0.1:{port}", "m", "key")


def event(body):
    data = f"data: {json.dumps(body)}\r\n\r\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


async def echo(body, now):
    yield HEAD
    for _ in range(body["max_tokens"]):
        yield event({"choices": [{"text": "x"}]})
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    yield event({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 3}}})
    yield DONE


async def test_an_answer_is_counted_by_the_servers_usage():
    async with server_that(echo) as server:
        outcome = await complete(server, [1, 2, 3, 4], 5)
    assert not outcome.error
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (4, 5, 3)
    assert len(outcome.arrived_at_s) == 5
    assert 0 < outcome.ttft_s <= outcome.latency_s


async def refuse(body, now):
    yield b'HTTP/1.1 429 Too Many\r\nContent-Length: 40\r\n\r\n{"error": {"message": "no room for you"}}'


async def cut_short(body, now):
    yield HEAD
    yield event({"choices": [{"text": "x"}]})


async def fail_late(body, now):
    yield HEAD
    yield event({"choices": [{"text": "x"}]})
    yield event({"error": {"message": "the node was lost"}})


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(refuse, "HTTP 429: no room for you"), (cut_short, "0 bytes read"), (fail_late, "the node was lost")],
)
async def test_a_failure_is_reported_and_not_counted_as_served(answer, reason):
    async with server_that(answer) as server:
        run = await run_load(server, [LoadRequest(0.0, [1], 2)], None, lambda _: None)
    figures = report(run, Goodput(), {})
    assert (figures["completed"], figures["failed"]) == (0, 1)
    assert reason in figures["errors"][0]
    assert "failed:" in table(figures)


async def test_nobody_waits_for_the_answers_of_others():
    everyone_is_here = asyncio.Event()

    async def answer(body, now):
        # the first is answered when the eighth has been sent: a closed loop would hang here
        if now == 8:
            everyone_is_here.set()
        await everyone_is_here.wait()
        async for piece in echo(body, now):
            yield piece

    async with server_that(answer) as server:
        run = await run_load(server, [LoadRequest(0.0, [1], 1)] * 8, None, lambda _: None)
    assert [outcome.error for outcome in run.outcomes] == [""] * 8


async def test_a_turn_is_asked_when_the_one_before_it_was_answered():
    asked = []

    async def answer(body, now):
        asked.append((body["prompt"], now))
        async for piece in echo(body, now):
            yield piece

    session = LoadRequest(0.0, [1], 1, LoadRequest(0.0, [1, 2], 1, LoadRequest(0.0, [1, 2, 3], 1)))
    async with server_that(answer) as server:
        run = await run_load(server, [session], None, lambda _: None)
    assert asked == [([1], 1), ([1, 2], 1), ([1, 2, 3], 1)], "no two at once"
    assert [outcome.prompt_tokens for outcome in run.outcomes] == [1, 2, 3]
    assert [outcome.turn for outcome in run.outcomes] == [0, 1, 2]


async def test_what_is_not_answered_when_a_load_is_cut_is_forgotten():
    is_cut = asyncio.Event()

    async def answer(body, now):
        if body["prompt"] == [2]:
            await is_cut.wait()
        async for piece in echo(body, now):
            yield piece

    load = [LoadRequest(0.0, [1], 1), LoadRequest(0.0, [2], 1), LoadRequest(3600.0, [3], 1)]
    async with server_that(answer) as server:
        run = await run_load(server, load, None, lambda _: None, cut_s=1.0)
        is_cut.set()
    assert [outcome.prompt_tokens for outcome in run.outcomes] == [1]


async def test_a_sessions_next_prompt_has_the_answer_that_it_was_given():
    asked = []

    async def answer(body, now):
        asked.append(body["prompt"])
        yield HEAD
        yield event({"choices": [{"text": "x", "token_ids": [70, 71]}]})
        yield event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}})
        yield DONE

    later = LoadRequest(0.0, [1, 2, 3, 9, 9, 4], 2)
    session = LoadRequest(0.0, [1, 2, 3], 2, later, keeps_answer=True)
    async with server_that(answer) as server:
        await run_load(server, [session], None, lambda _: None)
    assert asked == [[1, 2, 3], [1, 2, 3, 70, 71, 4]]


async def test_a_session_begins_when_another_has_ended_and_its_subagents_beside_it():
    asked, most = [], 0

    async def answer(body, now):
        nonlocal most
        most = max(most, now)
        asked.append(body["prompt"][0])
        async for piece in echo(body, now):
            yield piece

    first = LoadRequest(99.0, [1], 1, LoadRequest(0.0, [2], 1), (LoadRequest(0.0, [3], 1),))
    load = [first, LoadRequest(99.0, [4], 1), LoadRequest(99.0, [5], 1)]
    async with server_that(answer) as server:
        run = await run_load(server, load, None, lambda _: None, sessions=1)
    assert [each for each in asked if each != 3] == [1, 2, 4, 5], "one session at a time, in order"
    assert sorted(asked) == [1, 2, 3, 4, 5]
    assert len(run.outcomes) == sum(map(num_turns, load)) == 5
    assert most <= 2


async def test_the_bound_on_concurrency_is_kept():
    most = 0

    async def answer(body, now):
        nonlocal most
        most = max(most, now)
        async for piece in echo(body, now):
            yield piece

    async with server_that(answer) as server:
        run = await run_load(server, [LoadRequest(0.0, [1], 1)] * 12, 3, lambda _: None)
    assert len(run.outcomes) == 12
    assert most <= 3


# --- figures ---


def served(sent, *arrived, prompt=10):
    return Outcome(sent, list(arrived), arrived[-1], prompt, 0, len(arrived))


def test_figures_are_those_of_their_definitions():
    run = LoadRun([served(0.0, 0.1, 0.2, 0.4), served(1.0, 1.3)], [0.0, 0.002], duration_s=2.0)
    figures = report(run, Goodput(ttft_s=0.2, tbt_s=0.2), {"seed": 1})
    assert figures["completed"] == 2
    assert figures["total_output_tokens"] == 4
    assert figures["output_throughput"] == 2.0
    assert figures["request_goodput"] == 0.5
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["mean_tpot_ms"] == pytest.approx(150)
    assert figures["median_itl_ms"] == pytest.approx(150)
    assert figures["p99_e2el_ms"] == pytest.approx(399)
    assert figures["max_send_delay_ms"] == 2.0


def test_goodput_bounds_are_read_and_wrong_ones_refused():
    assert parse_goodput("ttft:0.5,tbt:0.05") == Goodput(0.5, 0.05)
    assert parse_goodput("tpot:1") == Goodput(tbt_s=1.0)
    for wrong in ("ttft", "tfft:1", "ttft:x", "ttft:nan", "ttft:-1", "ttft:0"):
        with pytest.raises(ValueError, match=r"tfft|float|ttft"):
            parse_goodput(wrong)


def test_a_server_that_is_not_there_ends_the_command_with_a_reason(capsys):
    assert main(["--url", "http://127.0.0.1:1", "--requests", "1"]) == 2
    assert "warm-up: http://127.0.0.1:1: " in capsys.readouterr().err


def test_rows_of_a_trace_are_passed_over_and_blocks_have_a_size_as_replays(tmp_path, capsys):
    rows = [
        {"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": ids} for ids in ([1, 2, 3], [1])
    ]
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    nowhere = ["--url", "http://127.0.0.1:1", "--trace", str(trace), "--block-size", "16"]
    assert main(nowhere) == 2
    assert "t.jsonl:2: 1 hash_ids for 40 tokens; blocks of 16 make 3" in capsys.readouterr().err
    assert main([*nowhere, "--skip-bad"]) == 2
    said = capsys.readouterr().err
    assert "passed over" in said
    assert "warm-up" in said, "the trace was read"


def test_a_trace_that_is_not_there_is_reported(tmp_path, capsys):
    assert main(["--trace", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_a_report_that_could_not_be_written_is_refused_before_anything_is_sent(tmp_path, capsys):
    report = tmp_path / "missing" / "r.json"
    assert main(["--url", "http://127.0.0.1:1", "--report", str(report)]) == 2
    assert f"--report {report}: no file can be written there" in capsys.readouterr().err


@pytest.mark.parametrize("parser", [make_parser, profile_parser])
def test_help_names_the_defaults_that_there_are_and_no_key(parser, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    text = " ".join(parser().format_help().split())
    assert "(default: smollm2)" in text
    assert "(default: 0)" in text
    assert "(default: None)" not in text
    assert "(default: )" not in text
    assert "sk-secret" not in text


def test_gzipped_traces_are_read(tmp_path):
    file = tmp_path / "t.jsonl.gz"
    row = {"timestamp": 5, "input_length": 3, "output_length": 2, "hash_ids": [9]}
    file.write_bytes(gzip.compress(json.dumps(row).encode()))
    [request] = trace_load(read_trace(file), 1.0, None, None)
    assert (request.at_s, len(request.token_ids), request.output_tokens) == (0.005, 3, 2)


def test_a_trace_at_a_rate_keeps_its_prefixes_and_shares_none_with_another_copy(tmp_path):
    file = tmp_path / "t.jsonl"
    rows = [(0, 1500, [7, 8, 9]), (3000, 900, [7, 11]), (6000, 100, [12]), (9000, 100, [13])]
    file.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": tokens, "output_length": 3, "hash_ids": ids}) + "\n"
            for at, tokens, ids in rows
        )
    )
    trace = read_trace(file)
    one, other = (trace_at(trace, 2.0, 3, 1024, copy) for copy in (1, 2))
    assert [row.num_tokens for row in one.requests] == [1024, 900, 100]
    by_length = {row.num_tokens: row.chain for row in one.requests}
    assert by_length[1024][0] == by_length[900][0]
    assert len(by_length[1024]) == 2
    blocks = [{block for row in load.requests for block in row.chain} for load in (one, other)]
    assert not blocks[0] & blocks[1]
    assert all(0 <= row.arrival_s <= 1.5 for row in one.requests)
    assert one.requests == trace_at(trace, 2.0, 3, 1024, 1).requests


def test_a_trace_of_sessions_has_no_rate(tmp_path):
    file = tmp_path / "t.jsonl"
    row = {"session_id": "a", "timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [1]}
    later = {"session_id": "a", "delay_ms": 10, "input_length": 9, "output_length": 3, "hash_ids": [1]}
    file.write_text(json.dumps(row) + "\n" + json.dumps(later) + "\n")
    with pytest.raises(ValueError, match="session_id"):
        trace_at(read_trace(file), 2.0, 2, 1024, 0)
