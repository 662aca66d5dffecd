"""Links between processes: delay, stalls that heal, and cuts. What is sent in order arrives so.

A link that is stalled loses nothing: what was sent waits, as TCP would send it again. One that
is cut ends every stream and transfer between the two, which each side is told of, or learns
when it has waited too long.
"""

from __future__ import annotations

import itertools


class Network:
    """Knows who can reach whom, and when what was sent arrives."""

    def __init__(self, loop, rng, base_s, slow_share):
        self._loop, self._rng = loop, rng
        self._base_s, self._slow_share = base_s, slow_share
        self._stalled = {}
        self._waiting = {}
        self._streams = {}
        self._numbers = itertools.count()

    def delay_s(self):
        delay_s = self._base_s * self._rng.uniform(0.2, 1.8)
        return delay_s * 100 if self._rng.random() < self._slow_share else delay_s

    def stall(self, one, other):
        key = frozenset((one, other))
        self._stalled[key] = self._stalled.get(key, 0) + 1

    def heal(self, one, other):
        """End one stall; what waited arrives."""
        key = frozenset((one, other))
        self._stalled[key] -= 1
        if not self._stalled[key]:
            del self._stalled[key]
            for arrive in self._waiting.pop(key, []):
                arrive()

    def lane(self, one, other, context):
        """Return a one-way lane from `one` to `other`, where things arrive in `context`, in order."""
        return Lane(self, self._loop, frozenset((one, other)), context)

    def wait(self, key, arrive):
        self._waiting.setdefault(key, []).append(arrive)

    def holds(self, key):
        return key in self._stalled

    def opened(self, stream, *ends):
        """Remember a stream, by the processes at its ends, until it is closed."""
        number = next(self._numbers)
        self._streams[number] = (frozenset(ends), stream)
        return number

    def closed(self, number):
        self._streams.pop(number, None)

    def cut(self, *ends, told=None):
        """Break every stream that has all `ends`; only `told` is told of it, or both (None)."""
        for stream_ends, stream in list(self._streams.values()):
            if stream_ends.issuperset(ends):
                stream.cut(told)


class Lane:
    """Delivers in order."""

    def __init__(self, network, loop, key, context):
        self._network, self._loop, self._key, self._context = network, loop, key, context
        self._last_s = 0.0
        self._queue = []
        self._is_waiting = False
        self.is_cut = False

    def send(self, deliver, *args, extra_s=0.0):
        self._queue.append((deliver, args))
        self._last_s = max(self._last_s, self._loop.time() + extra_s + self._network.delay_s())
        self._loop.call_at(self._last_s, self._arrive, context=self._context)

    def _arrive(self):
        if self.is_cut or not self._queue:
            return
        if self._network.holds(self._key):
            if not self._is_waiting:
                self._is_waiting = True
                self._network.wait(self._key, self._resume)
            return
        deliver, args = self._queue.pop(0)
        deliver(*args)

    def _resume(self):
        self._is_waiting = False
        now_s, due = self._loop.time(), len(self._queue)
        for _ in range(due):
            self._last_s = max(self._last_s, now_s + self._network.delay_s())
            self._loop.call_at(self._last_s, self._arrive, context=self._context)
