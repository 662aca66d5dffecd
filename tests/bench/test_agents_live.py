"""Which sessions of a trace the bench of agents sends."""

import json
from itertools import chain

from bench.agents_live import FEWEST_TURNS, SHORTER_PAUSES, TURNS, most_decoding, sessions
from bench.workload import num_turns


def rows(session, first, turns):
    """Yield a session's rows as AIPerf writes them: what is new in each turn."""
    base = 10_000 * session
    ids = range(base, base + -(-first // 512))
    yield {"session_id": f"s{session}", "input_length": first, "output_length": 8, "hash_ids": [*ids]} | {
        "timestamp": 0.0
    }
    for turn in range(1, turns):
        row = {"session_id": f"s{session}", "input_length": 500, "output_length": 8, "delay": 20_000.0}
        yield row | {"hash_ids": [base + 1_000 + turn]}


def test_sessions_that_begin_short_are_cut_where_they_are_long(tmp_path):
    path = tmp_path / "trace.jsonl"
    many = [rows(0, 1_000, 5), rows(1, 9_000, 5), rows(2, 1_000, 2), rows(3, 1_000, 60), rows(4, 1_900, 60)]
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in [{"format": "aiperf"}, *chain.from_iterable(many)])
    )
    found = list(sessions(path, 2_000, 2_600, None))
    lengths = []
    for first in found:
        turn, prompts = first, []
        while turn is not None:
            prompts.append(len(turn.token_ids))
            assert len(turn.token_ids) + turn.output_tokens <= 2_600
            turn = turn.next_turn
        lengths.append(prompts)
    assert lengths == [[1_000, 1_508, 2_016, 2_524], [1_000, 1_508, 2_016, 2_524]]
    assert found[0].next_turn.at_s == 20.0 / SHORTER_PAUSES
    assert [num_turns(first) for first in sessions(path, 2_000, 10**6, None)] == [5, TURNS, TURNS]
    assert min(map(len, lengths)) >= FEWEST_TURNS


def test_the_most_that_decode_together_is_read_from_decisions(tmp_path):
    path = tmp_path / "decisions.jsonl"
    seen = [
        {"kind": "decision", "seen": {"nodes": [{"decode_sequences": n}, {"decode_sequences": 1}]}}
        for n in (2, 7, 3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"kind": "conductor"}, *seen]))
    assert most_decoding(path) == 7
