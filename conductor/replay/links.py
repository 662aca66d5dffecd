"""Links: flows between simulated nodes, sharing bandwidth max-min fairly.

Every node has one link with a rate out and a rate in. A flow may have a limit of its own:
a hand-off cannot leave faster than its layers are computed. Rates are max-min fair: no
flow can gain without one that is no faster losing. Two cases need no computation, and are
nearly all: a flow that takes what is left at both ends, where the others have all they
want and no more than it gets, changes nobody's rate; and one that leaves ends where the
others have all they want frees nobody. Otherwise the flows connected with it are filled
progressively.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

Schedule = Callable[..., None]
"""(moment, what to call, its arguments...)."""

Done = Callable[..., None]

# Of a link's rate: below this share left, it counts as full (sums of rates drift).
FULL = 1e-9


@dataclass(slots=True, eq=False)
class SimLink:
    """One direction of one node's link: its rate, and who uses it."""

    capacity: float
    flows: dict[Flow, None] = field(default_factory=dict)
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.capacity


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way from one link to another."""

    sender: SimLink
    receiver: SimLink
    remaining: float
    limit: float
    done: Done
    """Called with the moment and `arguments` when the last byte arrived."""
    arguments: tuple[Any, ...] = ()
    rate: float = 0.0
    is_slowed: bool = False
    """Whether it has less than its limit."""
    moved_at_s: float = 0.0
    version: int = 0


class Links:
    """All flows of the cluster."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._num_slowed = 0
        self.bytes_moved = 0.0

    def start(self, flow: Flow, now_s: float) -> None:
        """Let `flow` run until its last byte arrived."""
        flow.moved_at_s = now_s
        sender, receiver = flow.sender, flow.receiver
        # alone on its links, a flow has all it wants
        flow.limit = min(flow.limit, sender.capacity, receiver.capacity)
        sender.flows[flow] = None
        receiver.flows[flow] = None
        self.bytes_moved += flow.remaining
        rate = flow.limit
        if rate <= sender.left and rate <= receiver.left:
            self._set_rate(flow, rate, now_s)
            return
        rate = min(sender.left, receiver.left)
        if _takes_no_more_than_fair(flow, rate):
            self._set_rate(flow, rate, now_s)
        else:
            self._share(flow, now_s)

    def cancel(self, flow: Flow, now_s: float) -> None:
        """End a flow before its last byte; one that has ended is passed over."""
        if flow in flow.sender.flows:
            self._settle(flow, now_s)
            self.bytes_moved -= flow.remaining
            self._leave(flow, now_s)

    def _leave(self, flow: Flow, now_s: float) -> None:
        flow.version += 1
        for link in (flow.sender, flow.receiver):
            flows = link.flows
            del flows[flow]
            # an empty link is exactly empty: sums of rates drift
            link.left = link.left + flow.rate if flows else link.capacity
        self._num_slowed -= flow.is_slowed
        if not self._num_slowed:
            return
        for link in (flow.sender, flow.receiver):
            for other in link.flows:
                if other.is_slowed:
                    self._share(other, now_s)
                    break

    def _finished(self, flow: Flow, version: int, now_s: float) -> None:
        if version == flow.version:
            flow.remaining = 0.0
            self._leave(flow, now_s)
            flow.done(now_s, *flow.arguments)

    @staticmethod
    def _settle(flow: Flow, now_s: float) -> None:
        flow.remaining = max(0.0, flow.remaining - flow.rate * (now_s - flow.moved_at_s))
        flow.moved_at_s = now_s

    def _set_rate(self, flow: Flow, rate: float, now_s: float) -> None:
        more = rate - flow.rate
        flow.sender.left -= more
        flow.receiver.left -= more
        flow.rate = rate
        if flow.is_slowed != (rate < flow.limit):
            flow.is_slowed = not flow.is_slowed
            self._num_slowed += 1 if flow.is_slowed else -1
        flow.version += 1
        ends_at_s = now_s + flow.remaining / rate
        self._schedule(ends_at_s, self._finished, flow, flow.version, ends_at_s)

    def _share(self, first: Flow, now_s: float) -> None:
        """Give every flow connected with `first` its fair rate."""
        for flow, rate in _max_min(*_connected(first)).items():
            if rate != flow.rate:
                self._settle(flow, now_s)
                self._set_rate(flow, rate, now_s)


def _takes_no_more_than_fair(flow: Flow, rate: float) -> bool:
    """Return whether `rate`, all that is left, leaves nobody wanting who has less."""
    if rate <= FULL * flow.sender.capacity:
        return False
    for link in (flow.sender, flow.receiver):
        for other in link.flows:
            if other is not flow and (other.is_slowed or other.rate > rate):
                return False
    return True


def _is_modest(flow: Flow) -> bool:
    """Return whether an equal share at both ends would be enough: then it gets its limit."""
    sender, receiver = flow.sender, flow.receiver
    return (
        flow.limit * len(sender.flows) <= sender.capacity
        and flow.limit * len(receiver.flows) <= receiver.capacity
    )


def _connected(first: Flow) -> tuple[list[Flow], dict[Flow, float], list[SimLink]]:
    """Return the flows whose rates depend on each other, modest ones with their rate, and the links.

    Dependence goes from flow to flow over links, but not through modest flows that have
    their limit already.
    """
    seen: dict[Flow, None] = {}
    greedy: list[Flow] = []
    modest: dict[Flow, float] = {}
    links: dict[SimLink, None] = {first.sender: None, first.receiver: None}
    waiting = [first.sender, first.receiver]
    while waiting:
        for flow in waiting.pop().flows:
            if flow in seen:
                continue
            seen[flow] = None
            if _is_modest(flow):
                modest[flow] = flow.limit
                if flow.rate == flow.limit:
                    continue
            else:
                greedy.append(flow)
            for link in (flow.sender, flow.receiver):
                if link not in links:
                    links[link] = None
                    waiting.append(link)
    return greedy, modest, list(links)


def _max_min(flows: list[Flow], rates: dict[Flow, float], links: list[SimLink]) -> dict[Flow, float]:
    """Add each flow's max-min fair rate to `rates`: raise all alike, stop those that hit a bound."""
    left = {link: link.capacity for link in links}
    users = dict.fromkeys(links, 0)
    for flow, rate in rates.items():
        for link in (flow.sender, flow.receiver):
            if link in left:
                left[link] -= rate
    for flow in flows:
        users[flow.sender] += 1
        users[flow.receiver] += 1
    running = dict.fromkeys(flows)
    while running:
        share, tightest = inf, links[0]
        for link, count in users.items():
            if count:
                fair = max(left[link], FULL * link.capacity) / count
                if fair < share:
                    share, tightest = fair, link
        stopped = [flow for flow in running if flow.limit <= share]
        if not stopped:
            stopped = [flow for flow in tightest.flows if flow in running]
        for flow in stopped:
            rates[flow] = rate = min(flow.limit, share)
            del running[flow]
            for link in (flow.sender, flow.receiver):
                left[link] -= rate
                users[link] -= 1
    return rates
