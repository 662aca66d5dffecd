"""An answer that is cut off while its client does not read."""

import asyncio

import pytest

from conductor.api.http_errors import internal_error
from conductor.api.http_reply import JOINED_BYTES, Reply


@pytest.mark.parametrize("num_bytes", [1, 3 * JOINED_BYTES])
async def test_an_error_ends_a_stream_between_events_and_never_within_one(num_bytes):
    is_full, has_room = asyncio.Event(), asyncio.Event()
    sent = []

    async def send(message):
        if len(sent) == 3:
            is_full.set()
            await has_room.wait()
        sent.append(message)

    async def write():
        for _ in range(3):
            await reply.event(f"data: {'x' * num_bytes}\n\n")

    reply = Reply(send, "id")
    writing = asyncio.create_task(write())
    async with asyncio.timeout(60):
        await is_full.wait()
        writing.cancel()
        await asyncio.wait([writing])
        has_room.set()
        await reply.fail(internal_error())
    events = b"".join(message["body"] for message in sent[1:]).split(b"\n\n")
    whole = [False, False, True, False]
    assert [b"error" in event for event in events] == (whole if num_bytes == 1 else [False])
