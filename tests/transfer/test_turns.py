"""Who has a turn: so many at a time, what a request waits for first, and none is lost."""

import asyncio

import pytest

from transfer.batch import Priority
from transfer.turns import Turns


async def waiting(turns: Turns, name: str, priority: Priority, order: list[str]) -> asyncio.Task[None]:
    async def wait() -> None:
        await turns.wait(priority)
        order.append(name)

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    return task


async def test_no_more_than_there_are_are_taken_at_a_time() -> None:
    turns = Turns(2)
    assert [turns.take() for _ in range(3)] == [True, True, False]
    turns.give_back()
    assert [turns.take() for _ in range(2)] == [True, False]


async def test_what_a_request_waits_for_has_the_next_turn() -> None:
    turns, order = Turns(1), list[str]()
    turns.take()
    tasks = [
        await waiting(turns, name, priority, order)
        for name, priority in (
            ("copy", Priority.BACKGROUND),
            ("first", Priority.FOREGROUND),
            ("second", Priority.FOREGROUND),
        )
    ]
    for _ in tasks:
        turns.give_back()
        await asyncio.sleep(0)
    assert order == ["first", "second", "copy"]
    assert not turns.take()
    turns.give_back()
    assert turns.take()


@pytest.mark.parametrize("is_handed_over", [False, True])
async def test_a_turn_that_is_waited_for_no_longer_is_the_next_ones(is_handed_over: bool) -> None:
    turns, order = Turns(1), list[str]()
    turns.take()
    gone = await waiting(turns, "gone", Priority.FOREGROUND, order)
    last = await waiting(turns, "last", Priority.FOREGROUND, order)
    if is_handed_over:
        turns.give_back()
        gone.cancel()
    else:
        gone.cancel()
        await asyncio.sleep(0)
        turns.give_back()
    await last
    assert order == ["last"]
    assert not turns.take()
    turns.give_back()
    assert turns.take()
