"""What must not be left half done ends, whoever cancels meanwhile."""

import asyncio
import gc

import pytest

from base.uninterrupted import uninterrupted
from tests.uncollected import uncollected


class BrokenError(Exception):
    """What fails here raises."""


async def waiting(event, fails):
    await event.wait()
    if fails:
        raise BrokenError
    return 7


async def test_it_returns_or_raises_as_the_work_does():
    event = asyncio.Event()
    event.set()
    assert await uninterrupted(waiting(event, fails=False)) == 7
    with pytest.raises(BrokenError):
        await uninterrupted(waiting(event, fails=True))


@pytest.mark.parametrize("fails", [False, True])
async def test_who_is_cancelled_leaves_when_the_work_has_ended_and_nobody_misses_its_error(fails):
    event, unseen = asyncio.Event(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context["message"]))
    task = asyncio.ensure_future(uninterrupted(waiting(event, fails)))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    assert not task.done()
    event.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    gc.collect()
    assert unseen == []


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_its_end_leaves_nothing_for_the_garbage_collector(is_cancelled):
    event = asyncio.Event()

    async def caught():
        try:
            await uninterrupted(waiting(event, fails=True))
        except (BrokenError, asyncio.CancelledError):
            return "caught"

    with uncollected() as left:
        task = asyncio.ensure_future(caught())
        await asyncio.sleep(0)
        if is_cancelled:
            task.cancel()
            await asyncio.sleep(0)
        event.set()
        assert await task == "caught"
        del task
        await asyncio.sleep(0)
        assert left(BaseException) == []
