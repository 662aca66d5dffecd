"""Every injected fault is noticed or harmless, however many; and nothing leaks."""

import random

import pytest

from base.errors import StaleError
from bench.faults.transfers import HARMLESS, RAISING, SILENT, CorruptError, Pair, soak
from bench.faults.transport import Fault


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("fault", [*HARMLESS, *SILENT, *RAISING])
async def test_a_fault_is_noticed_or_harmless(transport: str, fault: Fault | None) -> None:
    async with Pair(transport) as pair:
        assert await pair.send(random.Random(3), fault) == (fault in HARMLESS)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_a_late_write_is_stale_and_touches_nothing(transport: str) -> None:
    async with Pair(transport) as pair:
        await pair.send(random.Random(1), Fault.LATE)
        before = bytes(pair.theirs.memory)
        outcomes = await pair.deliver_late()
        assert [type(outcome) for outcome in outcomes] == [StaleError]
        assert pair.theirs.memory == before


async def test_what_is_accepted_and_was_not_sent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.faults.transfers.checksum", lambda data: 7)
    async with Pair("shm") as pair:
        with pytest.raises(CorruptError):
            await pair.send(random.Random(3), Fault.FLIP)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_thousands_of_transfers_accept_nothing_corrupt_and_leak_nothing(transport: str) -> None:
    row = await soak(transport, 2_000)
    assert row["objects_more"] < 4_000
    assert row["grants_left"] == 0
    assert row["injected"].total() - row["injected"]["none"] > 1_400
