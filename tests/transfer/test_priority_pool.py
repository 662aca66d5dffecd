"""Who is lent a thing: each to one at a time, what a request waits for first, and none is lost."""

import asyncio

import pytest

from transfer.batch import Priority
from transfer.priority_pool import PriorityPool


async def waiting(
    pool: PriorityPool[str], name: str, priority: Priority, order: list[str]
) -> asyncio.Task[None]:
    async def wait() -> None:
        await pool.take(priority)
        order.append(name)

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    return task


async def test_no_thing_is_lent_twice_at_a_time() -> None:
    pool, order = PriorityPool(["one", "other"]), list[str]()
    lent = [await pool.take(Priority.FOREGROUND) for _ in range(2)]
    assert sorted(lent) == ["one", "other"]
    third = await waiting(pool, "third", Priority.FOREGROUND, order)
    assert not third.done()
    pool.give_back(lent[0])
    await third
    pool.give_back(lent[0])
    assert await pool.take(Priority.FOREGROUND) == lent[0]


async def test_what_a_request_waits_for_has_the_next() -> None:
    pool, order = PriorityPool(["it"]), list[str]()
    await pool.take(Priority.FOREGROUND)
    for name, priority in (
        ("copy", Priority.BACKGROUND),
        ("first", Priority.FOREGROUND),
        ("second", Priority.FOREGROUND),
    ):
        await waiting(pool, name, priority, order)
    for _ in range(3):
        pool.give_back("it")
        await asyncio.sleep(0)
    assert order == ["first", "second", "copy"]


@pytest.mark.parametrize("is_handed_over", [False, True])
async def test_what_is_waited_for_no_longer_is_the_next_ones(is_handed_over: bool) -> None:
    pool, order = PriorityPool(["it"]), list[str]()
    await pool.take(Priority.FOREGROUND)
    gone = await waiting(pool, "gone", Priority.FOREGROUND, order)
    last = await waiting(pool, "last", Priority.FOREGROUND, order)
    if is_handed_over:
        pool.give_back("it")
        gone.cancel()
    else:
        gone.cancel()
        await asyncio.sleep(0)
        pool.give_back("it")
    await last
    assert order == ["last"]
    pool.give_back("it")
    assert await pool.take(Priority.FOREGROUND) == "it"
