"""A request that waits to be placed, and what becomes of it in the turns in which two things happen to it."""

import asyncio
import gc

import pytest

from tests.conductor.dispatching import answer, conductor, request, until


async def test_a_client_that_leaves_as_its_request_is_let_go_is_no_error_in_the_log():
    unseen = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context["message"]))
    async with conductor(role_wait_s=5.0, max_waiting=1) as running:
        dispatcher = running.dispatcher
        low = asyncio.ensure_future(answer(dispatcher, request(request_id="low", priority=-1)))
        await until(lambda: "low.1" in dispatcher.queue)
        high = asyncio.ensure_future(answer(dispatcher, request(request_id="high")))
        await until(lambda: "high.1" in dispatcher.queue)
        low.cancel()
        with pytest.raises(asyncio.CancelledError):
            await low
        high.cancel()
        await asyncio.wait([high])
    del low, high
    gc.collect()
    assert unseen == []
