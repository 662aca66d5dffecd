"""Coroutines at once: the first failure is raised alone, and who cancels is heard."""

import asyncio
import gc
import weakref
from contextlib import aclosing

import pytest

from base.together import beside, merged, together
from tests.uncollected import uncollected


class BrokenError(Exception):
    """What fails here raises."""


async def failing(event):
    await event.wait()
    raise BrokenError


async def value(number):
    await asyncio.sleep(0)
    return number


async def slow(ended):
    """Wait until cancelled, and end in a later turn."""
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        ended.append("slow")


async def test_results_come_in_order():
    assert await together(value(number) for number in range(5)) == [0, 1, 2, 3, 4]
    assert await together(iter(())) == []


async def test_the_first_failure_is_raised_when_the_others_have_ended_and_cancels_nobody_else():
    fails, ended = asyncio.Event(), []

    asyncio.get_running_loop().call_soon(fails.set)
    with pytest.raises(BrokenError):
        await together([slow(ended), failing(fails)])
    assert ended == ["slow"]
    assert asyncio.current_task().cancelling() == 0


@pytest.mark.parametrize("turns", range(5))
async def test_a_cancellation_in_the_turns_about_a_failure_is_not_taken_for_it(turns):
    fails, went_on, loop = asyncio.Event(), [], asyncio.get_running_loop()

    async def work():
        try:
            await together([failing(fails), value(1)])
        except BrokenError:
            went_on.append("after the failure")
            await asyncio.Event().wait()

    task = asyncio.ensure_future(work())
    for _ in range(3):
        await asyncio.sleep(0)
    fails.set()

    def cancel(left):
        if left:
            loop.call_soon(cancel, left - 1)
        else:
            task.cancel()

    cancel(turns)
    with pytest.raises(asyncio.CancelledError):
        await task
    # In the turn of the failure and the one after it the cancellation is first.
    assert went_on == ([] if turns < 3 else ["after the failure"])


async def test_an_error_leaves_nothing_for_the_garbage_collector():
    gc.disable()
    try:
        errors = []

        async def ask():
            try:
                await together([failing(fails), value(1)])
            except BrokenError as error:
                errors.append(weakref.ref(error))

        fails = asyncio.Event()
        fails.set()
        await ask()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert errors[0]() is None
    finally:
        gc.enable()


async def counting(name, count, log):
    try:
        for number in range(count):
            log.append((name, number))
            yield name, number
    finally:
        log.append((name, "closed"))


async def test_streams_are_merged_as_they_come_and_wait_until_each_item_is_taken():
    log, taken = [], []
    async with aclosing(merged(counting(name, count, log) for name, count in (("a", 3), ("b", 1)))) as items:
        async for item in items:
            taken.append(item)
            ahead = [made for made in log if made[1] != "closed" and made not in taken]
            assert len(ahead) <= 1, "one of each stream"
    assert taken == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
    assert [made for made in log if made[1] == "closed"] == [("b", "closed"), ("a", "closed")]
    async with aclosing(merged(iter(()))) as items:
        assert [item async for item in items] == []


async def test_closing_closes_the_merged_streams():
    log = []
    async with aclosing(merged(counting(name, 9, log) for name in "ab")) as items:
        assert await anext(items) == ("a", 0)
    assert log == [("a", 0), ("b", 0), ("a", "closed"), ("b", "closed")]


async def test_a_stream_that_fails_closes_the_others_after_what_came_before():
    log, taken = [], []

    async def broken():
        yield "once"
        raise BrokenError

    async def take():
        async with aclosing(merged([counting("a", 9, log), broken()])) as items:
            async for item in items:
                taken.append(item)

    with pytest.raises(BrokenError):
        await take()
    assert taken[:2] == [("a", 0), "once"]
    assert log[-1] == ("a", "closed")
    assert asyncio.current_task().cancelling() == 0


async def test_a_merged_failure_leaves_nothing_for_the_garbage_collector():
    gc.disable()
    try:
        errors = []

        async def broken():
            yield 1
            raise BrokenError

        async def take():
            try:
                async with aclosing(merged([broken()])) as items:
                    async for _ in items:
                        pass
            except BrokenError as error:
                errors.append(weakref.ref(error))

        await take()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert errors[0]() is None
    finally:
        gc.enable()


async def test_work_beside_a_body_ends_before_it_is_left():
    ended = []

    async def work(number):
        await asyncio.sleep(0)
        ended.append(number)

    async with beside() as begin:
        for number in range(3):
            begin(work(number))
    assert sorted(ended) == [0, 1, 2]


async def test_a_failure_beside_ends_the_body_and_the_others_and_is_raised_alone():
    fails, ended = asyncio.Event(), []

    async def work():
        async with beside() as begin:
            begin(slow(ended))
            begin(failing(fails))
            begin(failing(fails))
            try:
                fails.set()
                await asyncio.Event().wait()
            finally:
                ended.append("body")

    with pytest.raises(BrokenError):
        await work()
    assert ended == ["body", "slow"]
    assert asyncio.current_task().cancelling() == 0


async def test_a_body_that_fails_ends_what_is_beside_it():
    ended = []

    async def slow():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("slow")
            raise LookupError

    async def work():
        async with beside() as begin:
            begin(slow())
            await asyncio.sleep(0)
            raise BrokenError

    with pytest.raises(BrokenError):
        await work()
    assert ended == ["slow"]


@pytest.mark.parametrize("is_body_over", [False, True])
async def test_a_cancellation_ends_a_body_and_what_is_beside_it(is_body_over):
    begun, ended = asyncio.Event(), []

    async def slow():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("slow")

    async def work():
        async with beside() as begin:
            begin(slow())
            if not is_body_over:
                await asyncio.Event().wait()

    task = asyncio.ensure_future(work())
    await asyncio.wait_for(begun.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["slow"]


@pytest.mark.parametrize("fault", ["fails beside", "the body fails", "cancelled"])
async def test_the_end_of_a_body_leaves_nothing_for_the_garbage_collector(fault):
    fails = asyncio.Event()

    async def work():
        async with beside() as begin:
            begin(failing(fails))
            await asyncio.sleep(0)
            if fault == "fails beside":
                fails.set()
            elif fault == "the body fails":
                raise BrokenError
            else:
                asyncio.current_task().cancel()
            await asyncio.Event().wait()

    with uncollected() as left:
        task = asyncio.ensure_future(work())
        await asyncio.wait([task])
        assert task.cancelled() or isinstance(task.exception(), BrokenError)
        del task
        await asyncio.sleep(0)
        assert left(BaseException) == []
