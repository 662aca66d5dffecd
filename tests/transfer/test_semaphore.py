"""Who has a permit: so many at a time, what a request waits for first, and none is lost."""

import asyncio

import pytest

from transfer.batch import Priority
from transfer.semaphore import PrioritySemaphore


async def waiting(
    permits: PrioritySemaphore, name: str, priority: Priority, order: list[str]
) -> asyncio.Task[None]:
    async def wait() -> None:
        await permits.acquire(priority)
        order.append(name)

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    return task


async def test_no_more_permits_than_there_are_are_taken_at_a_time() -> None:
    permits = PrioritySemaphore(2)
    assert [permits.try_acquire() for _ in range(3)] == [True, True, False]
    permits.release()
    assert [permits.try_acquire() for _ in range(2)] == [True, False]


async def test_what_a_request_waits_for_has_the_next_permit() -> None:
    permits, order = PrioritySemaphore(1), list[str]()
    permits.try_acquire()
    tasks = [
        await waiting(permits, name, priority, order)
        for name, priority in (
            ("copy", Priority.BACKGROUND),
            ("first", Priority.FOREGROUND),
            ("second", Priority.FOREGROUND),
        )
    ]
    for _ in tasks:
        permits.release()
        await asyncio.sleep(0)
    assert order == ["first", "second", "copy"]
    assert not permits.try_acquire()
    permits.release()
    assert permits.try_acquire()


@pytest.mark.parametrize("is_handed_over", [False, True])
async def test_a_permit_that_is_waited_for_no_longer_is_the_next_ones(is_handed_over: bool) -> None:
    permits, order = PrioritySemaphore(1), list[str]()
    permits.try_acquire()
    gone = await waiting(permits, "gone", Priority.FOREGROUND, order)
    last = await waiting(permits, "last", Priority.FOREGROUND, order)
    if is_handed_over:
        permits.release()
        gone.cancel()
    else:
        gone.cancel()
        await asyncio.sleep(0)
        permits.release()
    await last
    assert order == ["last"]
    assert not permits.try_acquire()
    permits.release()
    assert permits.try_acquire()
