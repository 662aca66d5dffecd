"""Recorded agents: WEKA's sessions with their subagents, and TraceLab's rounds."""

import json

import pytest

from base.errors import ConfigError
from bench.trace_file import write_trace
from conductor.replay.trace import turns
from conductor.replay.trace_formats import read_trace


def call(at_s, tokens, ids, **fields):
    return {"t": at_s, "type": "s", "model": "m", "in": tokens, "out": 5, "hash_ids": ids, **fields}


SUBAGENT = {
    "t": 6.0,
    "type": "subagent",
    "agent_id": "agent_001",
    "subagent_type": "Explore",
    "status": "completed",
    "requests": [call(7.0, 25, [1, 9], api_time=1.0), call(9.5, 30, [1, 9, 8])],
    "models": ["m"],
}
WEKA = {
    "id": "w",
    "models": ["m"],
    "block_size": 10,
    "hash_id_scope": "local",
    "requests": [
        call(0.0, 25, [1, 2], api_time=2.0),
        call(5.0, 40, [1, 2, 3, 4], api_time=0.5, think_time=2.5),
        SUBAGENT,
        call(12.0, 50, [1, 2, 3, 4, 5]),
    ],
}


def read(tmp_path, *rows, file_name="t.jsonl", **options):
    file = tmp_path / file_name
    file.write_text(
        "".join(json.dumps(each, indent=1 if file_name == "t.json" else None) + "\n" for each in rows)
    )
    return read_trace(file, **options)


@pytest.mark.parametrize("file_name", ["t.json", "t.jsonl"])
def test_a_weka_session_is_a_loop_with_the_pauses_that_were_recorded(tmp_path, file_name) -> None:
    trace = read(tmp_path, WEKA, file_name=file_name)
    assert (trace.format, trace.block_size, trace.num_requests) == ("weka", 10, 5)
    first, second, third = turns(trace.requests[0])
    assert [second.arrival_s, third.arrival_s] == [2.5, 6.5], "think_time, or what api_time leaves"
    assert [len(turn.chain) for turn in (first, second, third)] == [3, 4, 5]
    assert list(second.chain[:2]) == list(first.chain[:2])
    assert first.chain[2] not in second.chain, "a partial block has no id, and is nobody else's"


def test_a_subagent_goes_on_beside_its_session(tmp_path) -> None:
    _, second, _ = turns(read(tmp_path, WEKA).requests[0])
    [fork] = second.forks
    assert fork.arrival_s == 1.5
    assert fork.next_turn.arrival_s == 1.5
    assert fork.chain[0] == second.chain[0], "one session's ids are one namespace"
    assert fork.chain[1] not in second.chain


def test_ids_of_two_weka_sessions_are_their_own(tmp_path) -> None:
    one, two = read(tmp_path, WEKA, {**WEKA, "id": "x"}).requests
    assert not set(one.chain) & set(two.chain)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"requests": [call(0, 25, [1])]}, r"requests\[0\]\.hash_ids: 1 for 25 tokens"),
        ({"requests": [call(-1, 25, [1, 2])]}, r"requests\[0\]\.t: a time"),
        ({"requests": [{**SUBAGENT, "requests": 3}]}, r"requests\[0\]\.requests: a list"),
        (
            {"requests": [{**SUBAGENT, "requests": [call(0, 0, [])]}]},
            r"requests\[0\]\.requests\[0\]\.in: a whole number",
        ),
        (
            {"requests": [{**SUBAGENT, "requests": [SUBAGENT]}]},
            r"requests\[0\]\.requests\[0\]\.type: one of n, s",
        ),
        ({"requests": {}}, "requests: a list"),
        ({"hash_id_scope": "global"}, "hash_id_scope: local"),
        ({"block_size": 0}, "block_size: a whole number"),
    ],
)
def test_what_is_wrong_in_a_session_is_named(tmp_path, change, wanted) -> None:
    with pytest.raises(ConfigError, match=rf"t\.jsonl:1: {wanted}"):
        read(tmp_path, {**WEKA, **change})


def test_a_bad_request_of_a_session_is_passed_over_alone(tmp_path) -> None:
    calls = [*WEKA["requests"], call(20.0, 9, [3, 3, 3])]
    trace = read(tmp_path, {**WEKA, "requests": calls}, skip_bad=True)
    assert (trace.num_requests, trace.num_bad) == (5, 1)


def test_sessions_of_two_block_sizes_are_not_one_trace(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"t\.jsonl:2: block_size: 20 here and 10 elsewhere"):
        read(tmp_path, WEKA, {**WEKA, "block_size": 20})


def test_a_trace_with_subagents_is_not_written_as_rows(tmp_path) -> None:
    with pytest.raises(ValueError, match="subagents"):
        write_trace(read(tmp_path, WEKA), tmp_path / "again.jsonl")


def round_of(session, index, total, prefix, sent, answered, **fields):
    stamp = "2026-05-01T12:00:{:06.3f}Z".format
    events = [
        {"event_type": "user_message", "timestamp": stamp(0)},
        {"event_type": "tool_result", "timestamp": stamp(sent)},
        {"event_type": "text", "timestamp": stamp(answered)},
    ]
    tokens = {"input_tokens_total": total, "prefix_tokens": prefix, "newly_append_tokens": total - prefix}
    name = {"session_id": session, "round_index": index}
    return {**name, **tokens, "output_tokens": 7, "timing_events": events, **fields}


ROUNDS = [
    round_of("a", 1, 47, 25, 9.0, 11.0),
    round_of("a", 0, 25, 0, 1.0, 4.0),
    round_of("b", 0, 30, 10, 2.0, 3.0),
]


def test_tracelab_rounds_keep_the_prefix_that_the_engine_had(tmp_path) -> None:
    trace = read(tmp_path, *ROUNDS, block_size=10)
    one, two = trace.requests
    assert (trace.format, trace.num_requests) == ("tracelab", 3)
    assert [one.arrival_s, two.arrival_s] == [0.0, 1.0], "counted from the earliest, in order"
    assert one.next_turn.arrival_s == 5.0
    assert list(one.next_turn.chain[:2]) == list(one.chain[:2])
    assert one.chain[2] not in one.next_turn.chain
    assert [len(one.chain), len(one.next_turn.chain)] == [3, 5]
    assert not set(one.chain) & set(two.chain)


def test_compaction_shortens_what_is_kept(tmp_path) -> None:
    rounds = [*ROUNDS, round_of("a", 2, 35, 10, 20.0, 21.0)]
    last = turns(read(tmp_path, *rounds, block_size=10).requests[0])[-1]
    assert len(last.chain) == 4
    before = turns(read(tmp_path, *rounds, block_size=10).requests[0])[-2]
    assert len(set(last.chain) & set(before.chain)) == 1


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"input_tokens_total": 0}, "input_tokens_total: a whole number"),
        ({"prefix_tokens": -1}, "prefix_tokens: a whole number"),
        ({"output_tokens": None}, "output_tokens: a whole number"),
        ({"timing_events": []}, "timing_events: an input or an output event"),
        ({"timing_events": [{"event_type": "text", "timestamp": "noon"}]}, "timing_events: timestamp: "),
        ({"timing_events": [{"event_type": "text", "timestamp": 1777061212345}]}, "timing_events: timestamp"),
        ({"timing_events": [{"event_type": "text"}]}, "timing_events: timestamp: .* as 2026-05-01T12:00:00Z"),
        ({"session_id": None}, "session_id: a name"),
    ],
)
def test_what_is_wrong_in_a_round_is_named(tmp_path, change, wanted) -> None:
    with pytest.raises(ConfigError, match=rf"t\.jsonl:2: {wanted}"):
        read(tmp_path, ROUNDS[0], {**ROUNDS[1], **change})
