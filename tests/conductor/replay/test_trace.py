"""Reading, copying and generating traces."""

import json

import pytest

from base.errors import ConfigError
from bench.papers.generate import WORKLOADS, generate
from bench.trace_file import write_trace
from conductor.replay.trace import arrivals
from conductor.replay.trace_formats import read_trace
from tests.conductor.replay.builders import small_trace

GOOD = {"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}


def write(tmp_path, *rows) -> str:
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return file


def test_row_is_read_in_seconds_and_tokens(tmp_path) -> None:
    (request,) = read_trace(write(tmp_path, GOOD)).requests
    assert (request.arrival_s, request.num_tokens, request.output_tokens) == (1.5, 600, 3)
    assert list(request.chain) == [0, 1]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{not json", "no JSON"),
        ("[1]", "a JSON object is wanted"),
        ({**GOOD, "input_length": 0}, "input_length"),
        ({**GOOD, "input_length": 2_000}, "2 hash_ids for 2000 tokens"),
        ({**GOOD, "output_length": "3"}, "output_length"),
        ({**GOOD, "timestamp": -1}, "timestamp"),
        ({**GOOD, "hash_ids": ["a", "b"]}, "hash_ids"),
        ({"timestamp": 1}, "input_length is missing"),
    ],
)
def test_bad_row_is_named_with_file_line_and_reason(tmp_path, bad, reason: str) -> None:
    file = write(tmp_path, GOOD, bad, GOOD)
    with pytest.raises(ConfigError, match=f"t.jsonl:2: .*{reason}"):
        read_trace(file)
    trace = read_trace(file, skip_bad=True)
    assert (len(trace.requests), trace.num_bad) == (2, 1)
    assert reason in trace.bad_rows[0]


def test_block_size_of_the_header_is_used_and_a_flag_overrides_it(tmp_path) -> None:
    row = {**GOOD, "input_length": 30}
    file = write(tmp_path, {"block_size": 16}, row)
    assert read_trace(file).block_size == 16
    with pytest.raises(ConfigError, match="--block-size"):
        read_trace(file, block_size=512)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_written_trace_reads_back(tmp_path, name: str) -> None:
    trace = small_trace(50)
    write_trace(trace, tmp_path / name)
    again = read_trace(tmp_path / name)
    assert [list(row.chain) for row in again.requests] == [list(row.chain) for row in trace.requests]
    assert again.requests[-1].arrival_s == pytest.approx(trace.requests[-1].arrival_s, abs=1e-3)


def test_missing_and_empty_files_are_errors(tmp_path) -> None:
    with pytest.raises(ConfigError, match="gone"):
        read_trace(tmp_path / "gone.jsonl")
    (tmp_path / "e.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no request"):
        read_trace(tmp_path / "e.jsonl")


def test_copies_have_blocks_of_their_own_and_come_in_order() -> None:
    trace = small_trace(40)
    rows = list(arrivals(trace, 2.0, 3, 0.0, None, 0))
    assert len(rows) == 120
    stride = 1 + max(block for row in trace.requests for block in row.chain)
    copies: dict[int, list[float]] = {}
    for row in rows:
        (copy,) = {block // stride for block in row.chain}
        copies.setdefault(copy, []).append(row.arrival_s)
    assert [len(copies[copy]) for copy in range(3)] == [40] * 3
    assert [row.arrival_s for row in rows] == sorted(row.arrival_s for row in rows)
    assert copies[0] == [row.arrival_s / 2 for row in trace.requests]


def test_copies_do_not_arrive_at_the_same_instants() -> None:
    rows = list(arrivals(small_trace(40), 1.0, 3, 0.0, None, 0))
    assert len({row.arrival_s for row in rows}) == 120
    assert rows == list(arrivals(small_trace(40), 1.0, 3, 0.0, None, 0))


def test_sessions_begin_at_a_rate_whatever_their_times() -> None:
    rows = list(arrivals(small_trace(400), 1.0, 1, 0.0, None, 3, 8.0))
    assert [row.chain for row in rows] == [row.chain for row in small_trace(400).requests]
    assert rows[-1].arrival_s == pytest.approx(50.0, rel=0.2)
    assert [row.arrival_s for row in rows] == sorted(row.arrival_s for row in rows)


def test_jitter_spreads_arrivals_and_keeps_their_order() -> None:
    trace = small_trace(40)
    rows = list(arrivals(trace, 1.0, 1, 3.0, None, 7))
    assert [row.arrival_s for row in rows] == sorted(row.arrival_s for row in rows)
    assert [row.arrival_s for row in rows] != [row.arrival_s for row in trace.requests]
    assert rows == list(arrivals(trace, 1.0, 1, 3.0, None, 7))


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_generated_trace_is_well_formed_and_repeatable(workload: str, tmp_path) -> None:
    trace = generate(workload, 200, 4.0, 1)
    assert trace.requests == generate(workload, 200, 4.0, 1).requests
    assert trace.requests != generate(workload, 200, 4.0, 2).requests
    assert trace.span_s == pytest.approx(50.0)
    write_trace(trace, tmp_path / "g.jsonl")
    assert len(read_trace(tmp_path / "g.jsonl").requests) == 200


def test_id_after_another_predecessor_is_a_bad_row(tmp_path) -> None:
    file = write(tmp_path, GOOD, {**GOOD, "hash_ids": [2, 1]})
    with pytest.raises(ConfigError, match=r"t\.jsonl:2: id 1 follows 2 here and 0 elsewhere"):
        read_trace(file)


def test_session_is_a_first_turn_and_the_delays_of_the_others(tmp_path) -> None:
    later = {"session_id": "s", "delay_ms": 4000, "input_length": 700, "output_length": 5, "hash_ids": [0, 2]}
    trace = read_trace(write(tmp_path, {**GOOD, "session_id": "s"}, GOOD, later))
    alone, first = trace.requests
    assert (len(trace.requests), trace.num_requests, alone.next_turn) == (2, 3, None)
    assert first.next_turn is not None
    assert (first.next_turn.arrival_s, first.next_turn.num_tokens) == (4.0, 700)
    row, copy = [each for each in arrivals(trace, 2.0, 2, 0.0, None, 0) if each.next_turn]
    assert (row.arrival_s, row.next_turn.arrival_s) == (0.75, 2.0)
    assert copy.arrival_s > 0.75
    assert not set(row.next_turn.chain) & set(copy.next_turn.chain)


def test_session_reads_back_as_it_was_written(tmp_path) -> None:
    later = {"session_id": "s", "delay_ms": 4000, "input_length": 700, "output_length": 5, "hash_ids": [0, 2]}
    trace = read_trace(write(tmp_path, {**GOOD, "session_id": "s"}, later))
    write_trace(trace, tmp_path / "again.jsonl.gz")
    assert read_trace(tmp_path / "again.jsonl.gz").requests == trace.requests


def test_bailian_rows_have_seconds_and_short_blocks(tmp_path) -> None:
    row = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 33, "output_length": 7}
    trace = read_trace(write(tmp_path, {**row, "turn": 1, "type": "text", "hash_ids": [10, 11, 12]}))
    assert (trace.block_size, trace.requests[0].arrival_s) == (16, 61.5)


def test_burstgpt_rows_share_no_block_and_failures_are_bad_rows(tmp_path) -> None:
    file = tmp_path / "b.csv"
    file.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,1000,20,1020,Conversation log\n45,GPT-4,600,0,600,API log\n47,GPT-4,600,9,609,API log\n"
    )
    with pytest.raises(ConfigError, match=r"b\.csv:3: Response tokens: 0"):
        read_trace(file)
    trace = read_trace(file, skip_bad=True)
    assert [(row.arrival_s, row.num_tokens, row.output_tokens) for row in trace.requests] == [
        (0.0, 1000, 20),
        (42.0, 600, 9),
    ]
    assert not set(trace.requests[0].chain) & set(trace.requests[1].chain)


def test_azure_rows_are_dated(tmp_path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(file).requests
    assert (first.arrival_s, second.num_tokens) == (0.0, 396)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-5)


def test_rows_of_a_table_come_in_any_order(tmp_path) -> None:
    file = tmp_path / "b.csv"
    file.write_text("Timestamp,Request tokens,Response tokens\n50,10,1\n20,20,2\n40,30,3\n")
    rows = read_trace(file).requests
    assert [(row.arrival_s, row.num_tokens) for row in rows] == [(0.0, 20), (20.0, 30), (30.0, 10)]


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e300", "soon"])
def test_a_moment_that_is_none_is_a_bad_row_of_a_table(tmp_path, text: str) -> None:
    file = tmp_path / "b.csv"
    file.write_text(f"Timestamp,Request tokens,Response tokens\n1,10,1\n{text},20,2\n")
    with pytest.raises(ConfigError, match=r"b\.csv:3: Timestamp: a time in seconds is wanted"):
        read_trace(file)


def test_a_prompt_of_more_tokens_than_any_is_a_bad_row_of_a_table(tmp_path) -> None:
    file = tmp_path / "b.csv"
    file.write_text(f"Timestamp,Request tokens,Response tokens\n1,{10**15},1\n")
    with pytest.raises(ConfigError, match=r"b\.csv:2: Request tokens: at most"):
        read_trace(file)


def test_times_since_1970_count_from_the_first_request(tmp_path) -> None:
    rows = [{**GOOD, "timestamp": 1_700_000_000_000 + later_ms} for later_ms in (2_000, 0)]
    assert [row.arrival_s for row in read_trace(write(tmp_path, *rows)).requests] == [0.0, 2.0]


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv"])
def test_a_byte_order_mark_is_passed_over(tmp_path, name: str) -> None:
    table = "Timestamp,Request tokens,Response tokens\r\n1,600,3\r\n"
    text = table if name.endswith(".csv") else json.dumps(GOOD)
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert [row.num_tokens for row in read_trace(tmp_path / name).requests] == [600]


def test_a_trace_without_a_good_row_says_what_was_wrong_with_the_first(tmp_path) -> None:
    file = write(tmp_path, {**GOOD, "input_length": 2_000})
    with pytest.raises(ConfigError, match=r"no request in it; passed over .*t\.jsonl:1: 2 hash_ids for 2000"):
        read_trace(file, skip_bad=True)


def test_table_of_unknown_columns_is_refused(tmp_path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="neither BurstGPT"):
        read_trace(tmp_path / "x.csv")
