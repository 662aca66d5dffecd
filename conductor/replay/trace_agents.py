"""Recorded agents: WEKA's sessions, an object each, and TraceLab's rounds, a row each.

WEKA (`block_size`, `hash_id_scope`, `requests`): times in seconds from the session's start, `in` and `out`
tokens, whole contexts as `hash_ids` of the session's own, an entry of type `subagent` with requests of its
own. A subagent goes on beside its session, from the answer of the request before it in the list. The pause
before a request is its `think_time`; without one, the time since the request before it less that one's
`api_time`.

TraceLab (`input_tokens_total`, `prefix_tokens`, `newly_append_tokens`, `timing_events`): no ids, but how much
of a round's input the recording engine had already. So many leading blocks are those of the round before in
its session; the others are new. A round is sent at the last of its input events, and answered at the last of
its output events. Sessions share nothing with each other, and a subagent is a session like any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from conductor.replay.chains import JoinedChain
from conductor.replay.trace import DEFAULT_BLOCK_SIZE, TraceRequest, linked
from conductor.replay.trace_rows import (
    Row,
    TraceFile,
    block_ids,
    client,
    count,
    json_object,
    moment,
    text_date_s,
)

CALLS = ("n", "s")
"""Types of WEKA's entries that are requests: plain and streamed."""

INPUT_EVENTS = ("user_message", "tool_result")
OUTPUT_EVENTS = ("text", "reasoning", "tool_call")


class _Call(NamedTuple):
    """One request of a WEKA session."""

    at_s: float
    think_s: float | None
    api_s: float | None
    request: TraceRequest


class _SessionNames:
    """Names of one session's blocks: an id after another is another block."""

    def __init__(self, next_id: int) -> None:
        self.next_id = next_id
        self._names: dict[tuple[int, int], int] = {}

    def chain(self, ids: Sequence[int], num_tokens: int, block_size: int) -> tuple[int, ...]:
        """Return the names of a prompt's blocks, a last one without an id included."""
        names, before = [], -1
        for block in ids:
            name = self._names.get((before, block))
            if name is None:
                name = self._names[before, block] = self.next_id
                self.next_id += 1
            names.append(name)
            before = name
        if len(ids) * block_size < num_tokens:
            names.append(self.next_id)
            self.next_id += 1
        return tuple(names)


def weka_sessions(
    file: TraceFile, rows: Iterator[tuple[int, str]], block_size: int | None
) -> tuple[list[TraceRequest], int]:
    """Return the first requests of WEKA's sessions, and the block size that all of them have."""
    read, next_id, size = list[TraceRequest](), 0, block_size
    for number, line in rows:
        try:
            session = json_object(line)
            if missing := [key for key in ("block_size", "requests") if key not in session]:
                raise ValueError(f"{missing[0]} is missing")
            if session.get("hash_id_scope", "local") != "local":
                raise ValueError("hash_id_scope: local is wanted: each session's ids are its own")
            own_size = count(session, "block_size", 1)
            if size not in (None, own_size):
                raise ValueError(f"block_size: {own_size} here and {size} elsewhere")
            size = own_size
            names = _SessionNames(next_id)
            first = _WekaSession(names, size, file, number).read(session["requests"], "requests")
            next_id = names.next_id
        except ValueError as error:
            file.bad(number, error)
            continue
        read += first
    return read, size or DEFAULT_BLOCK_SIZE


class _WekaSession:
    """Reader of one session's entries."""

    def __init__(self, names: _SessionNames, block_size: int, file: TraceFile, number: int) -> None:
        self._names = names
        self._block_size = block_size
        self._file = file
        self._number = number

    def read(self, entries: object, where: str, is_subagent: bool = False) -> list[TraceRequest]:
        """Return the first request, and before it those of subagents that nothing came before."""
        if not isinstance(entries, list):
            raise ValueError(f"{where}: a list is wanted")
        calls: list[_Call] = []
        forks: list[list[tuple[float, TraceRequest]]] = []
        alone: list[TraceRequest] = []
        for place, entry in enumerate(entries):
            here = f"{where}[{place}]"
            try:
                if not isinstance(entry, dict):
                    raise ValueError("an object is wanted")
                if entry.get("type") == "subagent" and not is_subagent:
                    for first in self.read(entry.get("requests"), f"{here}.requests", is_subagent=True):
                        (forks[-1] if calls else [(0.0, first)]).append((first.arrival_s, first))
                        alone += [] if calls else [first]
                    continue
                calls.append(self._call(entry))
                forks.append([])
            except ValueError as error:
                self._file.bad(self._number, _at(here, error))
        return alone + ([_in_turn(calls, forks)] if calls else [])

    def _call(self, entry: Row) -> _Call:
        if entry.get("type") not in CALLS:
            raise ValueError(f"type: one of {', '.join(CALLS)} or subagent is wanted")
        if missing := [key for key in ("t", "in", "out") if key not in entry]:
            raise ValueError(f"{missing[0]} is missing")
        at_s = moment(entry, "t")
        num_tokens, output_tokens = count(entry, "in", 1), count(entry, "out", 1)
        ids = block_ids(entry.get("hash_ids") or [])
        full = num_tokens // self._block_size
        if len(ids) not in (full, -(-num_tokens // self._block_size)):
            raise ValueError(f"hash_ids: {len(ids)} for {num_tokens} tokens in blocks of {self._block_size}")
        chain = self._names.chain(ids, num_tokens, self._block_size)
        pauses = [
            None if entry.get(key) is None else moment(entry, key) for key in ("think_time", "api_time")
        ]
        return _Call(at_s, pauses[0], pauses[1], TraceRequest(at_s, num_tokens, output_tokens, chain))


def _at(where: str, error: ValueError) -> ValueError:
    text = str(error)
    return ValueError(text if text.startswith("requests") else f"{where}.{text}")


def _in_turn(calls: list[_Call], forks: list[list[tuple[float, TraceRequest]]]) -> TraceRequest:
    """Return the first of a session's calls, each with its pause and what forks from it."""
    turns: list[TraceRequest] = []
    before: _Call | None = None
    for call, beside in zip(calls, forks, strict=True):
        answered_s = call.at_s + (call.api_s or 0.0)
        forked = tuple(first._replace(arrival_s=max(0.0, began_s - answered_s)) for began_s, first in beside)
        request = call.request._replace(forks=forked)
        if before is not None:
            pause_s = call.think_s
            if pause_s is None:
                pause_s = max(0.0, call.at_s - before.at_s - (before.api_s or 0.0))
            request = request._replace(arrival_s=pause_s)
        turns.append(request)
        before = call
    return linked(turns)


class _Round(NamedTuple):
    """One row of TraceLab."""

    sent_s: float
    answered_s: float
    number: int
    row: Row


def tracelab_sessions(
    file: TraceFile, rows: Iterator[tuple[int, str]], block_size: int | None
) -> tuple[list[TraceRequest], int]:
    """Return the first rounds of TraceLab's sessions, and the size of the blocks that they are cut into."""
    size = block_size or DEFAULT_BLOCK_SIZE
    sessions: dict[str, list[_Round]] = {}
    for number, line in rows:
        try:
            row = json_object(line)
            sessions.setdefault(_session_of(row), []).append(_round(row, number))
        except ValueError as error:
            file.bad(number, error)
    began_s = min((each.sent_s for rounds in sessions.values() for each in rounds), default=0.0)
    read, next_id = list[TraceRequest](), 0
    for rounds in sessions.values():
        rounds.sort(key=lambda each: (each.sent_s, each.number))
        chain, answered_s, turns = JoinedChain(), began_s, list[TraceRequest]()
        for each in rounds:
            total, prefix = each.row["input_tokens_total"], each.row["prefix_tokens"]
            kept = chain.up_to(min(prefix, total) // size)
            fresh = range(next_id, next_id + -(-total // size) - sum(map(len, kept)))
            next_id = fresh.stop
            full = JoinedChain(*kept, fresh)
            pause_s = max(0.0, each.sent_s - answered_s)
            output_tokens = each.row["output_tokens"]
            turns.append(TraceRequest(pause_s, total, output_tokens, full, None, (), *client(each.row)))
            # a partial block is another one when the next round has filled it
            chain, answered_s = JoinedChain(*full.up_to(total // size)), each.answered_s
        read.append(linked(turns))
    return read, size


def _session_of(row: Row) -> str:
    if not isinstance(row.get("session_id"), str | int):
        raise ValueError("session_id: a name is wanted")
    return str(row["session_id"])


def _round(row: Row, number: int) -> _Round:
    """Return a row whose numbers were checked, and when it was sent and answered."""
    for key, least in (("input_tokens_total", 1), ("prefix_tokens", 0), ("output_tokens", 1)):
        if key not in row:
            raise ValueError(f"{key} is missing")
        count(row, key, least)
    events = row.get("timing_events")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError("timing_events: a list of objects is wanted")
    came = [_stamp(each) for each in events if each.get("event_type") in INPUT_EVENTS]
    left = [_stamp(each) for each in events if each.get("event_type") in OUTPUT_EVENTS]
    if not came and not left:
        raise ValueError("timing_events: an input or an output event is wanted, to know when it was sent")
    sent_s = max(came) if came else min(left)
    return _Round(sent_s, max([sent_s, *left]), number, row)


def _stamp(event: Row) -> float:
    return text_date_s(event.get("timestamp", ""), "timing_events: timestamp")
