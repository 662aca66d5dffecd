"""How far apart pieces of streams are, by how busy the event loop is, and which go out in one turn of it.

    share = worked seconds / (seconds that passed - those for which other threads had the processor)
    interval of a stream = the interval that streams had x share / TARGET_SHARE

A piece costs mostly the same for one token and for ten, so that a loop with too much to do sends fewer,
larger ones. While each token goes out by itself, the interval is longer than a step if and only if the loop
is busy for more than TARGET_SHARE of its time, whatever with; then it grows until the loop is that busy, or
to LONGEST_S for each stream, where other work alone is more. No fixed interval would do: the loop of a quick
processor has time for every token where that of a slow one has not. Of a processor that others want too the
loop has a part, and is measured by that part: worked seconds alone would call a loop idle that never sleeps.
Tokens come step by step: pieces that are k steps apart come k - 1 apart again once the loop is busy for less
than TARGET_SHARE x (k - 1) / k.

The interval that streams had is a mean over pieces. By the number of streams it would be longer than any had
where some send nothing, because their clients read nothing or they wait for a place in a step: an idle loop
would look like one that pieces fill, and more so with each interval that grows.

Tokens of all streams of a node come in one message. Pieces go out a few in each turn of the event loop, in
the order in which they came due: between two turns the loop reads what has arrived, and a new request waits
for a few pieces in place of one of every stream.
"""

from __future__ import annotations

import asyncio
from collections import deque

from base.clock import Clock

TARGET_SHARE = 0.75
"""The share of its time that the event loop is busy for, where streams are what it is busy with."""
LONGEST_S = 4e-4
"""Seconds between two pieces of one stream, for each stream that there is, at most."""
LOOK_S = 0.1
"""Seconds from one look at how busy the event loop was to the next, at least."""
STALE_S = 1.0
"""Seconds after which a look says more of what else the event loop did than of pieces."""
PIECES_A_TURN = 8
"""Pieces that one turn of the event loop may send, however many are due. Each takes 20 to 50 us."""
TURNS = 8
"""Turns of the event loop in which two thirds of the pieces that are due go out, however many they are."""


class StreamPace:
    """The pace of all streams of one event loop, to which it belongs."""

    def __init__(self, shortest_s: float, clock: Clock) -> None:
        """Begin with no stream and the longest intervals.

        Args:
            shortest_s: Seconds between two pieces of one stream at least, however idle the event loop is.
        """
        self._shortest_s = shortest_s
        self._clock = clock
        self._num_streaming = 0
        self._for_each_s = LONGEST_S
        """The interval for each stream that there is."""
        self._num_pieces = 0
        self._gaps_s = 0.0
        """Seconds of the pieces since the last look, each from the one before of its stream."""
        self._looked_at_s, self._busy = clock.now_s(), clock.busy()
        self._due: deque[asyncio.Future[None]] = deque()
        """Streams that have a piece to send, in the order in which they came due."""

    def began(self) -> None:
        """Note that one more stream runs."""
        self._num_streaming += 1

    def ended(self) -> None:
        """Note that one stream less runs."""
        self._num_streaming -= 1

    @property
    def interval_s(self) -> float:
        """Seconds between two pieces of one stream, at least."""
        return max(self._shortest_s, self._num_streaming * self._for_each_s)

    def sent(self, gap_s: float) -> None:
        """Note a piece, `gap_s` after the one before; every LOOK_S, look at how busy the event loop was."""
        self._num_pieces += 1
        # a longer one was no interval: for such a time there was nothing to send, or nobody to take it
        self._gaps_s += min(gap_s, max(LOOK_S, 2 * self.interval_s))
        wall_s = self._clock.now_s() - self._looked_at_s
        if wall_s >= LOOK_S:
            self._look(is_stale=wall_s > STALE_S)

    def _look(self, is_stale: bool) -> None:
        now_s, busy = self._clock.now_s(), self._clock.busy()
        wall_s = now_s - self._looked_at_s
        worked_s, waited_s = busy.worked_s - self._busy.worked_s, busy.waited_s - self._busy.waited_s
        if not is_stale:
            share = worked_s / max(wall_s - waited_s, worked_s, 1e-9)
            interval_s = self._gaps_s / self._num_pieces * share / TARGET_SHARE
            for_each_s = interval_s / max(1, self._num_streaming)
            # half of it is what was before: looks differ by a step
            self._for_each_s = min((self._for_each_s + for_each_s) / 2, LONGEST_S)
        self._looked_at_s, self._busy, self._num_pieces, self._gaps_s = now_s, busy, 0, 0.0

    def wake(self, stream: asyncio.Future[None]) -> None:
        """Have `stream` resolved in a turn of the event loop, the next one if no others are due."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._turn)
        self._due.append(stream)

    def _turn(self) -> None:
        for _ in range(min(max(PIECES_A_TURN, len(self._due) // TURNS), len(self._due))):
            stream = self._due.popleft()
            if not stream.done():
                stream.set_result(None)
        if self._due:
            asyncio.get_running_loop().call_soon(self._turn)
