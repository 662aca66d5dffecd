"""Fair queue: who is placed next, and who is let go, when more requests wait than can be placed.

    higher criticality first
    among equals the tenant that has had the least, in predicted seconds of prefill
    of one tenant's requests the one whose first token is due first

Three classes of criticality, from the sign of a request's priority: critical (above 0),
standard (0), sheddable (below). They are strict: a class is served when no higher one
waits. Strict order by the number itself was weighed: then a tenant's share would be what
numbers it dares to send. Before them all goes what was begun and lost its node, which is never
let go, and not counted among those who may wait: calls in progress are bounded elsewhere.

Fair shares are those of start-time fair queueing: each tenant has a virtual time that
advances by what it is given, and one that returns from a pause begins at the present
virtual time, so that nobody saves up. When too many wait, one of the tenant with the most waiting
goes, in whatever classes they are: of its lowest, the request that is due last. By class first was
weighed: then whoever floods a class takes the places of all in the lower ones.

Pure state: no I/O, no clock. `placement_queue.py` asks it.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterator
from enum import IntEnum
from math import inf
from typing import NamedTuple

from base.request import RequestId

MAX_REMEMBERED = 4_096
"""Idle tenants whose virtual time, ahead of the present one, is remembered. Where there are no keys,
clients name as many tenants as they like; those past the limit begin at the present."""


PATIENCE_S = 30.0
"""A request without a TTFT bound is ordered as if it had this one: it is not passed by for ever."""

STRETCH = 20.0
"""A request without a TTFT bound that comes to a long line is ordered by so many times its own prefill.

Past capacity most are then served within a small multiple of that, and none is passed by for ever."""


class Criticality(IntEnum):
    """The class of a request: a higher one goes first, and is shed last."""

    SHEDDABLE = -1
    STANDARD = 0
    CRITICAL = 1
    BEGUN = 2
    """No client's to ask for: a request that was placed before, and lost its node."""


def criticality(priority: int) -> Criticality:
    """Return the class of a request's priority: its sign."""
    return Criticality((priority > 0) - (priority < 0))


class Waiting(NamedTuple):
    """A request that waits to be placed."""

    request_id: RequestId
    criticality: Criticality
    tenant: str
    due_at_s: float
    """When its first token is wanted, by which the requests of its tenant are ordered."""
    cost_s: float
    """Predicted seconds of prefill."""
    pressed_due_at_s: float = inf
    """When it is wanted by where the line is long; infinity: as always."""
    decodes: bool = True
    """Whether it needs a decode node."""


def waiting(
    request_id: RequestId,
    priority: int,
    tenant: str,
    arrived_at_s: float,
    ttft_slo_s: float,
    cost_s: float,
    whole_s: float,
    is_retry: bool = False,
) -> Waiting:
    """Return a request as one that waits; a retry, which has lost its node, goes first.

    `whole_s` is what its prompt takes where nothing of it is cached.
    """
    level = Criticality.BEGUN if is_retry else criticality(priority)
    due_at_s = arrived_at_s + min(ttft_slo_s, PATIENCE_S)
    pressed_s = STRETCH * whole_s if ttft_slo_s == inf else inf
    return Waiting(request_id, level, tenant, due_at_s, cost_s, arrived_at_s + pressed_s)


def pressed(item: Waiting) -> Waiting:
    """Return a request as it is ordered in a long line."""
    return item if item.pressed_due_at_s == inf else item._replace(due_at_s=item.pressed_due_at_s)


class FairQueue:
    """The waiting requests of one conductor. `check` asserts its invariants."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._lines: dict[Criticality, dict[str, list[tuple[float, int, Waiting]]]] = {
            each: {} for each in sorted(Criticality, reverse=True)
        }
        self._waiting: dict[RequestId, tuple[float, int, Waiting]] = {}
        self._num_pushed = 0
        self._virtual_s = 0.0
        self._given_s: dict[str, float] = {}
        """Each tenant's virtual time; absent: the present one."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waiting

    def push(self, item: Waiting) -> Waiting | None:
        """Take in a request; return the one that is let go for it, which may be itself."""
        self._num_pushed += 1
        if not self._is_waiting(item.tenant):
            self._given_s[item.tenant] = max(self._given(item.tenant), self._virtual_s)
        entry = (item.due_at_s, self._num_pushed, item)
        insort(self._lines[item.criticality].setdefault(item.tenant, []), entry)
        self._waiting[item.request_id] = entry
        if item.criticality is Criticality.BEGUN or self._num_new() <= self._max_waiting:
            return None
        victim = self._least_worthy()
        self.drop(victim.request_id)
        return victim

    def first(self) -> Waiting | None:
        """Return who is next; None: nobody waits."""
        if not self._waiting:
            return None
        for tenants in self._lines.values():
            if tenants:
                line = min(tenants.values(), key=lambda line: (self._given(line[0][2].tenant), line[0]))
                return line[0][2]
        return None

    def take(self, item: Waiting) -> None:
        """Remove a request whose turn it was, and charge its tenant."""
        given_s = self._given(item.tenant)
        self._virtual_s = max(self._virtual_s, given_s)
        self._given_s[item.tenant] = given_s + item.cost_s
        self.drop(item.request_id)
        if len(self._given_s) > MAX_REMEMBERED + len(self._waiting):
            self._given_s = {
                tenant: given_s for tenant, given_s in self._given_s.items() if self._is_waiting(tenant)
            }

    def drop(self, request_id: RequestId) -> None:
        """Remove a request; an unknown one is passed over."""
        entry = self._waiting.pop(request_id, None)
        if entry is None:
            return
        item = entry[2]
        tenants = self._lines[item.criticality]
        line = tenants[item.tenant]
        line.remove(entry)
        if not line:
            del tenants[item.tenant]
        if not self._is_waiting(item.tenant) and self._given_s[item.tenant] <= self._virtual_s:
            # it would begin at the present anyhow: what is remembered stays bounded
            del self._given_s[item.tenant]

    def seconds_ahead(self, item: Waiting) -> float:
        """Return the predicted seconds of those who will go before `item`, which need not wait yet.

        Another tenant of the class gets, until then, what brings its virtual time to where
        this one's will be, if it has so much waiting.
        """
        if not self._waiting:
            return 0.0
        higher: defaultdict[str, float] = defaultdict(float)
        for each, tenants in self._lines.items():
            if each > item.criticality:
                for tenant, line in tenants.items():
                    higher[tenant] += _seconds(line)
        tenants = self._lines[item.criticality]
        own = tenants.get(item.tenant, [])
        own_s = sum(other.cost_s for due_at_s, _, other in own if due_at_s <= item.due_at_s and other != item)
        # What a tenant is given in higher classes counts when the turn of this one comes.
        reached_s = self._given(item.tenant) + higher[item.tenant] + own_s
        ahead_s = sum(higher.values())
        for tenant, line in tenants.items():
            if tenant != item.tenant:
                behind_s = reached_s - self._given(tenant) - higher[tenant]
                ahead_s += min(_seconds(line), max(0.0, behind_s))
        return ahead_s + own_s

    def check(self) -> None:
        """Assert that every request waits once, in order, in the line of its class and tenant."""
        listed = [entry for line in self._all_lines() for entry in line]
        assert sorted(listed) == sorted(self._waiting.values()), "a request waits twice or nowhere"
        assert self._num_new() <= self._max_waiting, "too many wait"
        assert len(self._given_s) <= len(self._waiting) + MAX_REMEMBERED, "too many tenants are remembered"
        for line in self._all_lines():
            assert line, "an empty line is kept"
            assert line == sorted(line), "a line is not in order"
            assert len({(item.criticality, item.tenant) for _, _, item in line}) == 1, "a mixed line"

    def _num_new(self) -> int:
        """Return how many wait that were never placed."""
        return len(self._waiting) - sum(map(len, self._lines[Criticality.BEGUN].values()))

    def _given(self, tenant: str) -> float:
        return self._given_s.get(tenant, self._virtual_s)

    def _is_waiting(self, tenant: str) -> bool:
        return any(tenant in tenants for tenants in self._lines.values())

    def _all_lines(self) -> Iterator[list[tuple[float, int, Waiting]]]:
        for tenants in self._lines.values():
            yield from tenants.values()

    def _least_worthy(self) -> Waiting:
        """Return whom to let go: of the tenant with the most waiting, one of its lowest class."""
        places: Counter[str] = Counter()
        seconds: defaultdict[str, float] = defaultdict(float)
        lowest: dict[str, list[tuple[float, int, Waiting]]] = {}
        for level, tenants in self._lines.items():
            if level is not Criticality.BEGUN:
                for tenant, line in tenants.items():
                    places[tenant] += len(line)
                    seconds[tenant] += _seconds(line)
                    lowest[tenant] = line
        most = max(lowest, key=lambda tenant: (places[tenant], seconds[tenant], lowest[tenant][-1]))
        return lowest[most][-1][2]


def _seconds(line: list[tuple[float, int, Waiting]]) -> float:
    return sum(item.cost_s for _, _, item in line)
