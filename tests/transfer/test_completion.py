"""Work that is begun at once and given a time only if it has to wait."""

import asyncio

import pytest

from transfer.completion import Completion, begin


async def run_within(timeout_s, work):
    rest = begin(work)
    if rest is not None:
        async with asyncio.timeout(timeout_s):
            await rest


async def test_work_that_never_waits_ends_whatever_its_time() -> None:
    done = []

    async def work() -> None:
        done.append(1)

    await run_within(-1.0, work())
    assert done == [1]


async def test_work_that_waits_ends_when_what_it_waits_for_does() -> None:
    first, second, done = Completion(), Completion(), []

    async def work() -> None:
        await first.wait(lambda: None)
        await second.wait(lambda: None)
        done.append(1)

    waiting = asyncio.ensure_future(run_within(60.0, work()))
    for completion in (first, second):
        await asyncio.sleep(0)
        completion.end(None)
    await waiting
    assert done == [1]


async def test_an_error_of_the_first_step_or_a_later_one_reaches_the_caller() -> None:
    async def fails_at_once() -> None:
        raise LookupError("at once")

    async def fails_later() -> None:
        await asyncio.sleep(0)
        raise LookupError("later")

    with pytest.raises(LookupError, match="at once"):
        await run_within(60.0, fails_at_once())
    with pytest.raises(LookupError, match="later"):
        await run_within(60.0, fails_later())


async def test_time_that_ran_out_takes_the_work_back_before_it_is_told() -> None:
    completion, log = Completion(), []

    def cancel() -> None:
        log.append("cancelled")
        asyncio.get_running_loop().call_soon(completion.end, None)

    async def work() -> None:
        try:
            await completion.wait(cancel)
        finally:
            log.append("ended")

    with pytest.raises(TimeoutError):
        await run_within(0.0, work())
    assert log == ["cancelled", "ended"]


async def test_a_caller_that_is_cancelled_leaves_when_the_work_has_ended() -> None:
    completion, log = Completion(), []

    async def work() -> None:
        await completion.wait(lambda: log.append("cancelled"))

    waiting = asyncio.ensure_future(run_within(60.0, work()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    assert log == ["cancelled"]
    assert not waiting.done()
    completion.end(None)
    with pytest.raises(asyncio.CancelledError):
        await waiting
