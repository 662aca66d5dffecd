"""Sessions of rows: which row follows which, and rows that hold only what is new in a turn.

AIPerf's rows are incremental: `input_length` and `hash_ids` are what a turn adds, and its prompt is all
before it, answers included, and that. So blocks of a turn past the first stand nowhere in the file: a
session's context is cut into blocks here, those of the first prompt by the names that the file gives them
(sessions share them), the others by names of their own. A block that is partial at the end of one turn is
another block when the next has filled it.

A restart (`is_restart`) goes on with what another session ended with: its first prompt is that session's last
one, the answer included, and what is new. Its ids begin with those of the other's first prompt, which is how
it is found, and its blocks are that session's as far as both reach.
"""

from __future__ import annotations

from base.errors import ConfigError
from conductor.replay.chains import JoinedChain, KnownBlocks, Part
from conductor.replay.trace import TraceRequest, linked
from conductor.replay.trace_rows import MAX_TOKENS, TraceFile, TraceRow


def whole_sessions(rows: list[TraceRow]) -> list[TraceRequest]:
    """Return the first turns of rows that are whole prompts, each with those that follow it."""
    sessions: dict[str, list[list[TraceRequest]]] = {}
    alone: list[TraceRequest] = []
    for row in rows:
        if row.session is None:
            alone.append(row.request)
            continue
        loops = sessions.setdefault(row.session, [])
        if row.follows and loops:
            loops[-1].append(row.request)
        else:
            loops.append([row.request])
    return alone + [linked(loop) for loops in sessions.values() for loop in loops]


def holds_new_tokens(rows: list[TraceRow], file: TraceFile) -> bool:
    """Return whether rows hold what is new in a turn, rather than whole prompts, by their shape.

    A whole prompt begins as the one before it in its session; what is new does not.

    Raises:
        ConfigError: it cannot be seen.
    """
    before: dict[str, TraceRow] = {}
    num_alike, first_other = 0, 0
    for row in rows:
        if row.session is not None:
            earlier = before.get(row.session)
            if row.follows and earlier is not None:
                if row.has_ids and earlier.has_ids and row.request.chain[0] == earlier.request.chain[0]:
                    num_alike += 1
                else:
                    first_other = first_other or row.number
            before[row.session] = row
    is_marked = any(row.is_marked for row in rows)
    if is_marked != bool(num_alike) or not first_other:
        return is_marked and not num_alike
    raise ConfigError(
        f"{file.path}:{first_other}: hash_ids: whole prompts, or what is new in a turn? It cannot be seen "
        "here; --format mooncake or --format aiperf says it, or a header line"
    )


class _Context:
    """The blocks of one session, from its first prompt to its last answer."""

    def __init__(self, given: tuple[Part, ...], num_tokens: int, block_size: int, next_id: int) -> None:
        """Begin with `given` blocks, which others have too; `num_tokens` in all."""
        num_given = sum(map(len, given))
        own = range(next_id, next_id + max(0, num_tokens // block_size - num_given))
        self.num_tokens = num_tokens
        self.next_id = own.stop
        self.blocks = JoinedChain(*given, own)
        self._block_size = block_size

    def chain(self, num_tokens: int) -> JoinedChain:
        """Return the blocks of its first `num_tokens`, a partial one by a name of its own."""
        parts = self.blocks.up_to(num_tokens // self._block_size)
        if num_tokens % self._block_size:
            parts += (range(self.next_id, self.next_id + 1),)
            self.next_id += 1
        return JoinedChain(*parts)


def grown_sessions(rows: list[TraceRow], block_size: int, file: TraceFile) -> list[TraceRequest]:
    """Return the first turns of incremental rows, each with those that follow it."""
    sessions: dict[str, list[TraceRow]] = {}
    for row in rows:
        # a row of no session is one of its own
        sessions.setdefault(f"#{row.number}" if row.session is None else f"={row.session}", []).append(row)
    next_id = 1 + max((max(row.request.chain, default=0) for row in rows if row.has_ids), default=0)
    begun: dict[tuple[int, int], _Context] = {}
    known, read = KnownBlocks(), list[TraceRequest]()
    for session in sessions.values():
        try:
            first = session[0]
            total = _total_tokens(session)
            given = _given_blocks(first, block_size, begun, known)
            context = _Context(given, total, block_size, next_id)
        except ValueError as error:
            file.bad(first.number, error)
            continue
        if first.has_ids:
            # by the last id of a first prompt, which others do not have: what they share comes before
            begun.setdefault((len(first.request.chain), first.request.chain[-1]), context)
        read.append(_grown(session, context))
        next_id = context.next_id
    return read


def _total_tokens(session: list[TraceRow]) -> int:
    total = sum(row.request.num_tokens + row.request.output_tokens for row in session)
    if total > MAX_TOKENS:
        raise ValueError(f"input_length: a session of {total} tokens; at most {MAX_TOKENS} is wanted")
    return total


def _given_blocks(
    first: TraceRow, block_size: int, begun: dict[tuple[int, int], _Context], known: KnownBlocks
) -> tuple[Part, ...]:
    """Return the blocks of a session's first prompt that the file names.

    Args:
        begun: Earlier sessions, by the number of ids of their first prompts and the last of them.
    """
    ids = first.request.chain if first.has_ids else ()
    num_full = first.request.num_tokens // block_size
    if not first.is_restart:
        known.require_order(ids[:num_full])
        return (tuple(ids[:num_full]),)
    for place in range(len(ids), 0, -1):
        earlier = begun.get((place, ids[place - 1]))
        if earlier is not None:
            return earlier.blocks.up_to(min(num_full, earlier.num_tokens // block_size))
    raise ValueError("is_restart: no session before it in the file begins with its hash_ids")


def _grown(session: list[TraceRow], context: _Context) -> TraceRequest:
    num_tokens, turns = 0, []
    for row in session:
        num_tokens += row.request.num_tokens
        turns.append(row.request._replace(num_tokens=num_tokens, chain=context.chain(num_tokens)))
        num_tokens += row.request.output_tokens
    return linked(turns)
