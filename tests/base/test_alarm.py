"""An alarm ends its block with its own error, unless somebody else ended the task."""

import asyncio

import pytest

from base.alarm import Alarm


class GoneError(Exception):
    """What these alarms raise."""


async def rung(alarms, work):
    """Do `work` under an alarm, which is put into `alarms`; return its error and the task's count."""
    try:
        with Alarm(GoneError) as alarm:
            alarms.append(alarm)
            await work()
    except Exception as error:
        return type(error), asyncio.current_task().cancelling()
    return None, asyncio.current_task().cancelling()


async def begun(work):
    alarms = []
    task = asyncio.ensure_future(rung(alarms, work))
    await asyncio.sleep(0)
    return task, alarms[0]


async def waits():
    await asyncio.Event().wait()


async def test_a_ring_raises_the_alarms_error_and_leaves_no_cancellation():
    task, alarm = await begun(waits)
    alarm.ring()
    assert await task == (GoneError, 0)


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_cancellation_from_outside_in_the_same_turn_wins(is_first):
    task, alarm = await begun(waits)
    calls = [alarm.ring, task.cancel]
    for call in calls if is_first else reversed(calls):
        call()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_ring_in_the_turn_in_which_the_work_fails_leaves_no_cancellation():
    fails = asyncio.Event()

    async def failing():
        await fails.wait()
        raise ValueError

    async def work():
        async with asyncio.TaskGroup() as group:
            group.create_task(failing())
            await asyncio.Event().wait()

    task, alarm = await begun(work)
    await asyncio.sleep(0)
    fails.set()
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, alarm.ring)
    assert await task == (ExceptionGroup, 0)


async def test_a_ring_in_the_turn_in_which_a_limit_inside_fires_is_not_lost():
    async def work():
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.Event().wait()
        except TimeoutError:
            pass
        await asyncio.Event().wait()

    loop, limit_s = asyncio.get_running_loop(), 0.001
    task, alarm = await begun(work)
    due_s = loop.time() + limit_s
    loop.call_at(due_s, alarm.ring)
    while loop.time() < due_s + limit_s:
        pass
    assert await task == (GoneError, 0)


async def test_one_within_a_cleanup_of_a_cancelled_task_still_raises_its_own_error():
    alarms, told = [], []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            told.append(await rung(alarms, waits))

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    alarms[0].ring()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert told == [(GoneError, 1)]
