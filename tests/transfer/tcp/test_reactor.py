"""The reactor's thread outlives what it is asked to run."""

import os
import threading

import pytest

from transfer.tcp.reactor import READABLE, Reactor


def broken(*_: object) -> None:
    raise MemoryError("nobody foresaw this")


def test_what_is_posted_runs_in_order_also_behind_a_call_that_broke(caplog: pytest.LogCaptureFixture) -> None:
    reactor, ran = Reactor("test"), []
    for call in (broken, lambda: ran.append(1), broken, lambda: ran.append(2)):
        reactor.post(call)
    reactor.stop()
    assert ran == [1, 2]
    assert caplog.text.count("MemoryError: nobody foresaw this") == 2


def test_a_socket_whose_call_breaks_keeps_no_other_from_being_served() -> None:
    reactor, served = Reactor("test"), threading.Event()
    bad, good = (os.eventfd(1, os.EFD_NONBLOCK) for _ in range(2))

    def forget_and_break(_: int) -> None:
        reactor.forget(bad)
        broken()

    reactor.post(lambda: reactor.watch(bad, READABLE, forget_and_break))
    reactor.post(lambda: reactor.watch(good, READABLE, lambda _: served.set()))
    assert served.wait(60)
    reactor.post(lambda: reactor.forget(good))
    reactor.stop()
    os.close(bad)
    os.close(good)
