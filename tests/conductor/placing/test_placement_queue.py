"""The queue before placement: who is tried, in which order, and when waiting ends."""

from math import inf

import pytest

from base.errors import DeadlineError, RejectedError, SloUnreachableError, UnavailableError
from base.request import RequestId
from conductor.placing.fair_queue import waiting
from conductor.placing.placement_queue import SHORTEST_LOOK_S, PlacementQueue


class Asking:
    """A request of somebody who writes down what becomes of it."""

    def __init__(self, name, log, places):
        self.name, self.log, self.places = name, log, places

    def try_to_place(self, ahead_s):
        if ahead_s > 0 or not self.places:
            return False
        if self.places.pop() == "refuse":
            raise SloUnreachableError("predicted 2 s", 1.0)
        self.log.append(self.name)
        return True

    def ended(self, error):
        self.log.append((self.name, type(error).__name__))


class Line:
    """A queue, and the places that are free: each a word."""

    def __init__(self, max_waiting=8, role_wait_s=10.0):
        self.log, self.places, self.missing = [], [], None
        self.queue = PlacementQueue(max_waiting, role_wait_s, self.missing_role, lambda: 2, 0.0)

    def missing_role(self, decodes):
        return self.missing if decodes or self.missing != "decode" else None

    def join(
        self, name, now_s=0.0, by_s=inf, priority=0, is_retry=False, end_s=600.0, cost_s=1.0, slo_s=None, **of
    ):
        slo_s = by_s if slo_s is None else slo_s
        item = waiting(RequestId(name), priority, "", now_s, slo_s, cost_s, cost_s, is_retry)._replace(**of)
        return self.queue.join(item, Asking(name, self.log, self.places), now_s, by_s, end_s)

    def order(self, now_s):
        """Return who is placed one after the other."""
        placed = []
        while len(self.queue):
            self.places.append("free")
            self.queue.pump(now_s)
            placed.append(self.log[-1][0])
        return "".join(placed)


def test_who_comes_while_nobody_waits_is_placed_at_once_and_later_ones_in_order():
    line = Line()
    line.places.append("free")
    assert not line.join("a")
    assert line.join("b", 1.0)
    assert line.join("c", 2.0, priority=1)
    assert line.join("d", 3.0, is_retry=True)
    assert len(line.queue) == 3
    assert (line.queue.waiting_s, line.queue.line_s) == (3.0, 1.5)
    line.places += ["free"] * 2
    line.queue.pump(4.0)
    assert line.log == ["a", "d", ("d", "NoneType"), "c", ("c", "NoneType")]
    assert "b" in line.queue


def test_of_a_long_line_so_many_are_tried_in_a_turn_and_whether_others_are_left_is_said():
    line = Line(max_waiting=20)
    for name in "abcdef":
        assert line.join(name)
    line.places += ["free", "refuse"] * 2
    assert line.queue.pump(1.0, most=3)
    assert [told for told in line.log if isinstance(told, tuple)] == [
        ("a", "SloUnreachableError"),
        ("b", "NoneType"),
        ("c", "SloUnreachableError"),
    ]
    assert not line.queue.pump(1.0, most=3), "the second of them waits on"
    assert "e" in line.queue
    assert "d" not in line.queue


def test_who_comes_to_a_long_line_without_a_bound_is_ordered_by_what_it_takes():
    line = Line(max_waiting=20)
    # two nodes: "c" has four seconds before it, the others more
    for name, cost_s in (("a", 4.0), ("b", 4.0), ("c", 4.0), ("d", 9.0), ("e", 0.2), ("f", 1.0)):
        assert line.join(name, cost_s=cost_s)
    assert line.order(1.0) == "efabcd"


def test_a_bound_keeps_its_place_in_a_long_line_and_none_is_passed_by_for_ever():
    line = Line(max_waiting=40)
    assert line.join("l", cost_s=30.0, by_s=1e6, slo_s=20.0)
    assert line.join("m", cost_s=9.0)
    for number in range(30):
        assert line.join(f"{number}", now_s=10.0 * number, cost_s=1.0)
    order = line.order(400.0)
    assert order.startswith(("l0", "0l"))
    assert not order.endswith("m"), (
        "twenty times nine seconds after it came it goes before those that come then"
    )


def test_who_would_wait_longer_than_it_may_is_rejected_at_once():
    line = Line()
    assert line.join("a", cost_s=50.0)
    assert line.join("b", by_s=26.0, slo_s=inf, cost_s=2.0)
    with pytest.raises(SloUnreachableError, match="before those who wait"):
        line.join("c", by_s=20.0, slo_s=inf, cost_s=2.0)
    assert len(line.queue) == 2


def test_who_is_refused_while_waiting_is_told_why_and_the_next_one_is_tried():
    line = Line()
    for name in "ab":
        assert line.join(name)
    line.places += ["free", "refuse"]
    line.queue.pump(1.0)
    assert line.log == [("a", "SloUnreachableError"), "b", ("b", "NoneType")]
    assert not len(line.queue)


def test_who_is_refused_at_once_never_waits():
    line = Line()
    line.places.append("refuse")
    with pytest.raises(SloUnreachableError):
        line.join("a")
    assert not len(line.queue)


def test_one_too_many_is_let_go():
    line = Line(max_waiting=1)
    assert line.join("a", 0.0)
    assert not line.join("b", 1.0)
    assert line.log == [("b", RejectedError.__name__)]
    line.queue.leave(RequestId("b"))
    assert "a" in line.queue


@pytest.mark.parametrize(
    ("by_s", "end_s", "missing", "at_s", "error"),
    [
        (3.0, 600.0, None, 3.0, SloUnreachableError),
        (inf, 4.0, None, 4.0, DeadlineError),
        (inf, 600.0, "decode", 10.0, UnavailableError),
    ],
)
def test_waiting_ends_when_the_first_of_its_bounds_has_come(by_s, end_s, missing, at_s, error):
    line = Line()
    line.missing = missing
    assert line.join("a", by_s=by_s, end_s=end_s)
    assert line.queue.look_at_s(RequestId("a"), 0.0) == at_s
    assert line.queue.overdue(RequestId("a"), at_s - 0.1) is None
    assert isinstance(line.queue.overdue(RequestId("a"), at_s), error)


def test_a_wait_of_no_seconds_for_a_role_is_not_looked_at_without_end():
    line = Line(role_wait_s=0.0)
    assert line.join("a")
    assert line.queue.look_at_s(RequestId("a"), 5.0) == 5.0 + SHORTEST_LOOK_S


def test_who_decodes_nothing_waits_for_no_decode_node():
    line = Line()
    line.missing = "decode"
    assert line.join("tokens")
    assert line.join("vector", 1.0, decodes=False)
    assert isinstance(line.queue.overdue(RequestId("tokens"), 11.0), UnavailableError)
    assert line.queue.overdue(RequestId("vector"), 11.0) is None
    # whoever looks again at that moment looks for ever: the event loop does nothing else
    assert line.queue.look_at_s(RequestId("vector"), 11.0) > 11.0
    line.missing = "prefill"
    assert line.queue.overdue(RequestId("vector"), 12.0) is None, "lost a moment ago"
    assert line.queue.look_at_s(RequestId("vector"), 12.0) == 22.0
    assert isinstance(line.queue.overdue(RequestId("vector"), 22.0), UnavailableError)


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("missing", [None, "prefill", "decode"])
def test_nobody_is_looked_at_again_at_the_moment_at_which_it_was_not_overdue(missing, decodes):
    line = Line()
    line.missing = "decode"
    line.join("a", decodes=decodes)
    line.missing = missing
    now_s = 0.0
    for _ in range(8):
        looked_s, now_s = now_s, line.queue.look_at_s(RequestId("a"), now_s)
        if line.queue.overdue(RequestId("a"), now_s) is not None:
            return
        assert now_s > looked_s
