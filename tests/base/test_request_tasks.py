"""Every request that a node takes on ends with an answer or with its own cancellation."""

import asyncio
import inspect

import pytest

from base.errors import CapacityError, ChecksumError
from base.messages import Failed
from base.request_tasks import RequestTasks, first_serve_error
from tests.uncollected import uncollected


class Held:
    """Something a request holds; `free` says whether it was given back."""

    def __init__(self):
        self.free = False

    async def until(self, event):
        try:
            await event.wait()
        finally:
            self.free = True


async def test_an_expected_failure_is_answered_by_its_name():
    sent = []

    async def fail():
        raise CapacityError("no blocks")

    async with asyncio.TaskGroup() as group:
        RequestTasks(group, sent.append).start("r", fail())
    assert sent == [Failed("r", "CapacityError", "no blocks")]


async def test_a_bug_is_answered_and_does_not_end_the_node():
    sent = []

    async def break_():
        raise KeyError("oops")

    async with asyncio.TaskGroup() as group:
        tasks = RequestTasks(group, sent.append)
        tasks.start("r", break_())
        await tasks.idle()
    assert [(item.request_id, item.reason) for item in sent] == [("r", "LostError")]
    assert "oops" not in sent[0].message


async def test_ending_a_request_gives_back_what_it_holds_and_answers_nothing():
    sent, held = [], Held()
    async with asyncio.TaskGroup() as group:
        tasks = RequestTasks(group, sent.append)
        tasks.start("r", held.until(asyncio.Event()))
        await asyncio.sleep(0)
        tasks.end("r")
        tasks.end("r")
        await tasks.idle()
        assert len(tasks) == 0
    assert held.free
    assert sent == []


async def test_ending_all_requests_leaves_none():
    held = [Held() for _ in range(5)]
    async with asyncio.TaskGroup() as group:
        tasks = RequestTasks(group, lambda item: None)
        for number, item in enumerate(held):
            tasks.start(str(number), item.until(asyncio.Event()))
        await asyncio.sleep(0)
        tasks.end_all()
        await tasks.idle()
    assert all(item.free for item in held)


async def test_a_request_id_at_work_is_refused_and_the_first_goes_on():
    sent, held, go = [], Held(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        tasks = RequestTasks(group, sent.append)
        tasks.start("r", held.until(go))
        tasks.start("r", held.until(go))
        assert [item.reason for item in sent] == ["ProtocolError"]
        await asyncio.sleep(0)
        assert not held.free
        go.set()


def test_the_expected_error_is_found_inside_groups():
    error = ChecksumError("x")
    assert first_serve_error(ExceptionGroup("", [ValueError(), ExceptionGroup("", [error])])) is error
    assert first_serve_error(ExceptionGroup("", [ValueError()])) is None


@pytest.mark.parametrize("error", [ValueError(), ExceptionGroup("", [OSError()])])
def test_other_errors_are_not_expected(error):
    assert first_serve_error(error) is None


async def test_a_request_that_is_ended_before_it_began_leaves_nothing_unawaited():
    async with asyncio.TaskGroup() as group:
        tasks, work = RequestTasks(group, lambda item: None), Held().until(asyncio.Event())
        tasks.start("r", work)
        tasks.end("r")
        await tasks.idle()
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


async def _limited(limits, ended):
    """Work with a time limit inside, that goes on after it."""
    try:
        async with asyncio.timeout(None) as limit:
            limits.set_result(limit)
            await asyncio.Event().wait()
    except TimeoutError:
        ended.append("timed out")
    await asyncio.Event().wait()


@pytest.mark.parametrize("release_comes", ["before", "after"])
async def test_a_release_in_the_turn_in_which_a_limit_inside_fires_ends_the_request(release_comes):
    loop, ended = asyncio.get_running_loop(), []
    limits = loop.create_future()
    async with asyncio.TaskGroup() as group:
        tasks = RequestTasks(group, lambda item: None)
        tasks.start("r", _limited(limits, ended))
        limit, now_s = await limits, loop.time()
        limit.reschedule(now_s + 0.002)
        loop.call_at(now_s + (0.001 if release_comes == "before" else 0.003), tasks.end, "r")
        # The loop is held until both are due: they come in the order of their times, in one turn.
        while loop.time() < now_s + 0.005:
            pass
        await tasks.idle()
    assert ended == []


async def test_a_second_release_does_not_interrupt_what_the_first_lets_go_of():
    let_go, sent = [], []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            let_go.append("r")

    async with asyncio.TaskGroup() as group:
        tasks = RequestTasks(group, sent.append)
        tasks.start("r", work())
        await asyncio.sleep(0)
        tasks.end("r")
        await asyncio.sleep(0)
        tasks.end("r")
        await tasks.idle()
    assert let_go == ["r"]
    assert sent == []


@pytest.mark.parametrize("error", [CapacityError("no blocks"), KeyError("oops")])
async def test_a_failure_leaves_nothing_for_the_garbage_collector(error):
    sent, kind, text = [], type(error), str(error)
    del error

    async def fail():
        raise kind(text)

    with uncollected() as left:
        async with asyncio.TaskGroup() as group:
            tasks = RequestTasks(group, sent.append)
            tasks.start("r", fail())
            await tasks.idle()
        assert (len(sent), left(BaseException)) == (1, [])
