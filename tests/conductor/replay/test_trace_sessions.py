"""Sessions of rows: incremental ones, their restarts, and which of both kinds a file has."""

import json
from math import inf

import pytest

from base.errors import ConfigError
from base.request import Slo
from bench.trace_file import write_trace
from conductor.replay.chains import MAX_PARTS, JoinedChain, moved
from conductor.replay.trace import arrivals, every_request, turns
from conductor.replay.trace_formats import read_trace

HEADER = {"block_size": 10, "format": "aiperf"}


def row(session, tokens, output, ids, **fields):
    when = {} if {"timestamp", "delay"} & fields.keys() else {"delay": 1000}
    lengths = {"input_length": tokens, "output_length": output, "hash_ids": ids}
    return {"session_id": session, **lengths, **when, **fields}


SESSION = [
    row("a", 25, 5, [0, 1, 2], timestamp=0, group_id=1),
    row("a", 12, 8, [3, 4]),
    row("a", 10, 10, [5]),
]


def read(tmp_path, *rows, **options):
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return read_trace(file, **options)


def test_a_turns_context_is_all_before_it_answers_included(tmp_path) -> None:
    trace = read(tmp_path, HEADER, *SESSION)
    first, second, third = turns(trace.requests[0])
    assert trace.format == "aiperf"
    assert [turn.num_tokens for turn in (first, second, third)] == [25, 42, 60]
    assert [len(turn.chain) for turn in (first, second, third)] == [3, 5, 6]
    assert [turn.arrival_s for turn in (first, second, third)] == [0.0, 1.0, 1.0]
    assert list(first.chain[:2]) == [0, 1], "as the file names them: other sessions share them"
    assert list(second.chain[:2]) == [0, 1]
    assert list(third.chain[:4]) == list(second.chain[:4])


def test_a_partial_block_is_another_than_the_full_one_in_its_place(tmp_path) -> None:
    first, second, third = turns(read(tmp_path, HEADER, *SESSION).requests[0])
    assert first.chain[2] != second.chain[2]
    assert second.chain[4] != third.chain[4]


def test_sessions_share_what_their_first_prompts_share_and_nothing_more(tmp_path) -> None:
    other = [row("b", 25, 5, [0, 1, 9], timestamp=0), row("b", 12, 8, [3, 4])]
    one, two = read(tmp_path, HEADER, *SESSION, *other).requests
    assert list(one.chain[:2]) == list(two.chain[:2])
    later = [set(turn.chain[2:]) for first in (one, two) for turn in turns(first)]
    assert not set.union(*later[:3]) & set.union(*later[3:])


def test_a_restart_goes_on_with_the_blocks_that_its_session_ended_with(tmp_path) -> None:
    restart = row("b", 73, 5, [0, 1, 2, 3, 4, 5, 6, 7], timestamp=0, is_restart=True)
    one, two = read(tmp_path, HEADER, *SESSION, restart).requests
    last = turns(one)[-1]
    assert last.num_tokens + last.output_tokens == 70
    assert list(two.chain[:6]) == list(last.chain)
    assert len(two.chain) == 8
    assert len({*two.chain}) == 8


def test_a_restart_of_nothing_is_a_bad_row(tmp_path) -> None:
    restart = row("b", 25, 5, [7, 8, 9], timestamp=0, is_restart=True)
    with pytest.raises(ConfigError, match=r"t\.jsonl:5: is_restart: no session before it"):
        read(tmp_path, HEADER, *SESSION, restart)
    assert read(tmp_path, HEADER, *SESSION, restart, skip_bad=True).num_bad == 1


def test_what_aiperf_writes_is_known_by_its_own_fields(tmp_path) -> None:
    assert read(tmp_path, {"block_size": 10}, *SESSION).format == "aiperf"


def test_rows_that_may_be_whole_prompts_or_not_are_refused_until_somebody_says(tmp_path) -> None:
    rows = [{"block_size": 10}, row("a", 25, 5, [0, 1, 2], timestamp=0), row("a", 12, 8, [3, 4])]
    with pytest.raises(ConfigError, match=r"t\.jsonl:3: hash_ids: whole prompts, or what is new .*--format"):
        read(tmp_path, *rows)
    assert turns(read(tmp_path, *rows, name="aiperf").requests[0])[1].num_tokens == 42
    assert turns(read(tmp_path, *rows, name="mooncake").requests[0])[1].num_tokens == 12


def test_rows_that_are_marked_and_go_on_with_their_ids_are_refused_too(tmp_path) -> None:
    rows = [*SESSION[:1], row("a", 12, 8, [0, 4]), row("a", 10, 8, [7])]
    with pytest.raises(ConfigError, match="--format aiperf"):
        read(tmp_path, {"block_size": 10}, *rows)


def test_whole_prompts_are_known_by_what_they_begin_with(tmp_path) -> None:
    rows = [row("a", 25, 5, [0, 1, 2], timestamp=0), row("a", 32, 8, [0, 1, 3, 4])]
    assert read(tmp_path, {"block_size": 10}, *rows).format == "mooncake"


def test_turns_without_ids_or_moments_are_of_their_session_alone(tmp_path) -> None:
    rows = [{"session_id": "s", "input_length": 30, "output_length": 4}]
    rows.append({"session_id": "s", "delay": 2, "input_length": 15, "output_length": 2})
    [first] = read(tmp_path, *rows, name="aiperf").requests
    assert [turn.num_tokens for turn in turns(first)] == [30, 49]
    assert first.next_turn.arrival_s == 0.002


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("input_length", 1 << 25, "input_length: a whole number"),
        ("output_length", float("inf"), "output_length: a whole number"),
        ("delay", float("nan"), "delay: a time"),
        ("priority", "high", "priority: a whole number"),
        ("tenant", "x" * 100, "tenant: a name"),
        ("slo_ttft_ms", "soon", "slo_ttft_ms: a time"),
        ("slo_tpot_ms", float("inf"), "slo_tpot_ms: a time"),
        ("slo_gap_ms", 0, "slo_gap_ms: a bound is above 0"),
    ],
)
def test_what_is_wrong_is_named_with_row_and_field(tmp_path, field, value, wanted) -> None:
    rows = [*SESSION[:2], {**SESSION[2], field: value}]
    with pytest.raises(ConfigError, match=rf"t\.jsonl:4: {wanted}"):
        read(tmp_path, HEADER, *rows)


def test_a_session_longer_than_any_is_refused_with_little_work(tmp_path) -> None:
    rows = [{"session_id": "s", "input_length": 1 << 23, "output_length": 1} for _ in range(3)]
    with pytest.raises(ConfigError, match="a session of 25165827 tokens"):
        read(tmp_path, *rows, name="aiperf")


def test_unknown_format_in_a_header_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="format: one of mooncake, aiperf"):
        read(tmp_path, {"format": "mooncat"}, *SESSION)


def test_copies_of_sessions_share_no_block_and_come_at_other_moments(tmp_path) -> None:
    rows = list(arrivals(read(tmp_path, HEADER, *SESSION), 2.0, 3, 0.0, None, 0))
    blocks = [{block for each in every_request(copy) for block in each.chain} for copy in rows]
    assert not blocks[0] & blocks[1]
    assert not blocks[1] & blocks[2]
    assert len({copy.arrival_s for copy in rows}) == 3
    assert [turn.arrival_s for turn in turns(rows[0])[1:]] == [0.5, 0.5]


def test_priorities_and_tenants_are_read_and_written(tmp_path) -> None:
    fields = {"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}
    trace = read(tmp_path, {**fields, "priority": -1, "tenant": "a"})
    assert (trace.requests[0].priority, trace.requests[0].tenant) == (-1, "a")
    write_trace(trace, tmp_path / "again.jsonl")
    assert read_trace(tmp_path / "again.jsonl").requests == trace.requests


def test_bounds_of_a_request_are_read_and_written_and_the_others_are_of_the_run(tmp_path) -> None:
    fields = {"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}
    rows = {"slo_tpot_ms": 12.5}, {"hash_ids": [2]}, {"hash_ids": [3], "slo_ttft_ms": None}
    trace = read(tmp_path, *({**fields, **row} for row in rows))
    assert trace.requests[2].bounds.over(Slo(2.0, 0.1)) == (inf, 0.1, inf)
    bounds = trace.requests[0].bounds
    assert bounds == (None, 0.0125, None)
    assert bounds.over(Slo(2.0, 0.1, 0.3)) == (2.0, 0.0125, 0.3)
    assert trace.requests[1].bounds is None
    write_trace(trace, tmp_path / "again.jsonl")
    assert read_trace(tmp_path / "again.jsonl").requests == trace.requests


def test_a_chain_in_parts_reads_as_one_in_one_piece() -> None:
    chain = JoinedChain((5, 6), range(10, 13), range(13, 15), (), (40,))
    assert list(chain) == [5, 6, 10, 11, 12, 13, 14, 40]
    assert [chain[0], chain[4], chain[-1], len(chain)] == [5, 12, 40, 8]
    assert chain[1:4] == (6, 10, 11)
    assert [list(part) for part in chain.up_to(4)] == [[5, 6], [10, 11]]
    assert list(moved(chain, 100, {})) == [block + 100 for block in chain]
    with pytest.raises(IndexError):
        chain[8]


def test_a_chain_of_many_parts_is_copied_into_one() -> None:
    chain = JoinedChain(*(range(2 * at, 2 * at + 1) for at in range(MAX_PARTS + 1)))
    assert len(chain.parts) == 1
    assert list(chain) == list(range(0, 2 * MAX_PARTS + 2, 2))
