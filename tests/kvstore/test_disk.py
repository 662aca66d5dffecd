"""The disk tier: what was written is read, and whatever else lies there is a miss."""

import asyncio
import errno
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from base.checksum import checksum
from base.errors import ConfigError
from kvstore.disk import FILE_NAME, MAX_REST_S, DiskTier, opened
from kvstore.record import HEADER_BYTES, RecordHeader, encode_header, header_or_none
from tests.effort import counting
from tests.kvstore.disk_writer import BLOCK_BYTES, name_of, page_aligned, payload_of, read_back
from tests.manual_clock import ManualClock
from tests.simulation.disk import PAGE_BYTES, DiskFaults, SimDisk

ROOT = Path(__file__).parent.parent.parent
SLOT_BYTES = HEADER_BYTES + BLOCK_BYTES


async def open_tier(folder, num_slots=16):
    tier = opened(folder, BLOCK_BYTES, num_slots, ManualClock())
    await tier.recover()
    return tier


async def write(tier, number):
    block_hash = name_of(number)
    buffer = page_aligned(BLOCK_BYTES)
    buffer[:] = payload_of(block_hash)
    return await tier.write(block_hash, buffer, checksum(buffer))


async def reads(tier, number):
    into = page_aligned(BLOCK_BYTES)
    found = await tier.read(name_of(number), into)
    tier.check()
    if found is None:
        return False
    assert found == checksum(into)
    assert bytes(into) == payload_of(name_of(number))
    return True


async def test_blocks_survive_a_restart(tmp_path):
    tier = await open_tier(tmp_path)
    for number in range(5):
        assert await write(tier, number)
    await tier.close()
    tier = await open_tier(tmp_path)
    assert len(tier.hashes) == 5
    assert [await reads(tier, number) for number in range(6)] == [True] * 5 + [False]
    await tier.close()


async def test_memory_that_is_not_page_aligned_is_read_and_written_too(tmp_path):
    tier = await open_tier(tmp_path)
    odd = page_aligned(BLOCK_BYTES + 4096)[7 : 7 + BLOCK_BYTES]
    odd[:] = payload_of(name_of(1))
    assert await tier.write(name_of(1), odd, checksum(odd))
    odd[:] = bytes(BLOCK_BYTES)
    assert await tier.read(name_of(1), odd) == checksum(payload_of(name_of(1)))
    assert await reads(tier, 1)
    await tier.close()


async def test_what_was_forgotten_is_not_back_after_a_restart(tmp_path):
    tier = await open_tier(tmp_path)
    for number in range(4):
        await write(tier, number)
    assert await tier.forget(name_of(1))
    task = asyncio.ensure_future(tier.forget(name_of(2)))
    await asyncio.sleep(0)
    tier.check()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    tier.check()
    assert tier.accounts().in_transfer == 0
    await tier.close()
    tier = await open_tier(tmp_path)
    assert sorted(tier.hashes) == [name_of(0), name_of(3)]
    assert [await write(tier, number) for number in range(4, 6)] == [True] * 2
    assert (tmp_path / FILE_NAME).stat().st_size == 4 * SLOT_BYTES
    await tier.close()


async def test_what_is_forgotten_once_the_tier_is_closed_is_forgotten_for_now(tmp_path):
    """A read that ends as the tier closes, and finds damage, comes so late."""
    tier = await open_tier(tmp_path)
    await write(tier, 1)
    await tier.close()
    assert await tier.forget(name_of(1))
    tier.check()
    tier = await open_tier(tmp_path)
    assert tier.hashes == [name_of(1)]
    await tier.close()


async def test_a_full_tier_overwrites_what_was_not_read_for_longest(tmp_path):
    tier = await open_tier(tmp_path, num_slots=3)
    for number in range(3):
        await write(tier, number)
    assert await reads(tier, 0)
    await write(tier, 3)
    assert tier.hashes == [name_of(2), name_of(0), name_of(3)]
    assert tier.evicted == [name_of(1)]
    await tier.close()


async def test_the_newer_of_two_records_of_a_block_counts(tmp_path):
    tier = await open_tier(tmp_path)
    await write(tier, 1)
    await write(tier, 2)
    await tier.close()
    payload = payload_of(name_of(1))
    older = RecordHeader(name_of(1), BLOCK_BYTES, 0, 1, checksum(payload))
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(encode_header(older) + payload)
    tier = await open_tier(tmp_path)
    assert sorted(tier.hashes) == [name_of(1), name_of(2)]
    assert await reads(tier, 1)
    assert await tier.forget(name_of(1))
    await tier.close()
    tier = await open_tier(tmp_path)
    assert tier.hashes == [name_of(2)]
    await tier.close()


@pytest.mark.parametrize("seed", range(3))
async def test_every_one_of_a_tenth_of_records_corrupted_is_caught(tmp_path, seed):
    rng = random.Random(seed)
    tier = await open_tier(tmp_path, num_slots=100)
    for number in range(100):
        await write(tier, number)
    await tier.close()
    corrupted = set(rng.sample(range(100), 10))
    data = bytearray((tmp_path / FILE_NAME).read_bytes())
    for number in corrupted:
        inside = rng.choice([rng.randrange(68), HEADER_BYTES + rng.randrange(BLOCK_BYTES)])
        data[number * SLOT_BYTES + inside] ^= 1 << rng.randrange(8)
    (tmp_path / FILE_NAME).write_bytes(data)
    tier = await open_tier(tmp_path, num_slots=100)
    missed = {number for number in range(100) if not await reads(tier, number)}
    assert missed == corrupted
    await tier.close()


async def test_a_record_under_another_blocks_name_is_a_miss(tmp_path):
    tier = await open_tier(tmp_path)
    await write(tier, 1)
    payload = payload_of(name_of(2))
    header = RecordHeader(name_of(2), BLOCK_BYTES, 9, checksum(payload), checksum(payload))
    (tmp_path / FILE_NAME).write_bytes(encode_header(header) + payload)
    assert not await reads(tier, 1)
    assert tier.damaged == 1
    assert name_of(1) not in tier
    await tier.close()


@pytest.mark.parametrize("keep", [0, 10, HEADER_BYTES, HEADER_BYTES + 1, SLOT_BYTES - 1])
async def test_a_file_cut_off_anywhere_loses_the_cut_records_alone(tmp_path, keep):
    tier = await open_tier(tmp_path)
    for number in range(3):
        await write(tier, number)
    await tier.close()
    os.truncate(tmp_path / FILE_NAME, SLOT_BYTES + keep)
    tier = await open_tier(tmp_path)
    assert [await reads(tier, number) for number in range(3)] == [True, False, False]
    assert await write(tier, 7)
    await tier.close()


async def test_bytes_of_somebody_else_are_free_slots(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(random.Random(0).randbytes(3 * SLOT_BYTES + 5))
    tier = await open_tier(tmp_path)
    assert len(tier.hashes) == 0
    assert await write(tier, 1)
    assert await reads(tier, 1)
    await tier.close()


async def test_a_record_after_which_no_number_is_left_is_none_of_ours(tmp_path):
    payload = payload_of(name_of(1))
    last = RecordHeader(name_of(1), BLOCK_BYTES, 2**64 - 1, checksum(payload), checksum(payload))
    (tmp_path / FILE_NAME).write_bytes(encode_header(last) + payload)
    tier = await open_tier(tmp_path)
    assert [await write(tier, number) for number in range(2, 4)] == [True] * 2
    tier.check()
    assert await reads(tier, 2)
    await tier.close()


async def test_a_tier_of_another_block_size_starts_empty(tmp_path):
    tier = await open_tier(tmp_path)
    await write(tier, 1)
    await tier.close()
    other = opened(tmp_path, 2 * BLOCK_BYTES, 8, ManualClock())
    assert await other.recover() == 0
    await other.close()


async def test_a_tier_that_is_made_smaller_gives_the_disk_back_what_it_had_more(tmp_path):
    tier = await open_tier(tmp_path, num_slots=8)
    for number in range(8):
        await write(tier, number)
    await tier.close()
    tier = await open_tier(tmp_path, num_slots=3)
    assert (tmp_path / FILE_NAME).stat().st_size == 3 * SLOT_BYTES
    assert [await reads(tier, number) for number in range(8)] == [True] * 3 + [False] * 5
    await tier.close()
    tier = await open_tier(tmp_path, num_slots=8)
    assert len(tier.hashes) == 3
    await tier.close()


def no_thread(*_):
    raise RuntimeError("can't start new thread")


async def test_a_tier_goes_on_where_the_process_gets_no_threads_any_more(tmp_path, monkeypatch):
    tier = await open_tier(tmp_path)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert await asyncio.gather(*(write(tier, number) for number in range(8))) == [True] * 8
    assert [await reads(tier, number) for number in range(9)] == [True] * 8 + [False]
    monkeypatch.undo()
    await tier.close()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(ConfigError, match="can't start new thread"):
        await open_tier(tmp_path)
    monkeypatch.undo()
    await (await open_tier(tmp_path)).close()


async def test_without_memory_for_a_header_a_block_is_a_miss_and_no_slot_is_lost(tmp_path, monkeypatch):
    def no_memory(*_):
        raise OSError(errno.ENOMEM, "cannot allocate memory")

    clock = ManualClock()
    tier = opened(tmp_path, BLOCK_BYTES, 16, clock)
    await write(tier, 0)
    buffers = {number: page_aligned(BLOCK_BYTES) for number in range(3)}
    monkeypatch.setattr("kvstore.disk.mmap.mmap", no_memory)
    assert await tier.read(name_of(0), buffers[0]) is None
    assert not await tier.write(name_of(1), buffers[1], 0)
    monkeypatch.undo()
    tier.check()
    assert tier.accounts().held == tier.accounts().in_transfer == 0
    clock.advance(1.0)
    assert await write(tier, 2)
    await tier.close()


async def test_to_count_what_is_held_takes_no_look_at_each_slot():
    """A disk has a million of them, and they are counted every second."""
    tier = DiskTier(SimDisk(random.Random(0), DiskFaults()), BLOCK_BYTES, 400, ManualClock())
    for number in range(400):
        await write(tier, number)
    with counting() as effort:
        assert tier.accounts().cached == 400
    assert effort.lines < 50
    await tier.close()


async def test_a_full_disk_keeps_what_it_has_and_goes_on_in_place(tmp_path):
    tier = await open_tier(tmp_path, num_slots=8)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * SLOT_BYTES, unlimited[1]))
    try:
        stored = [await write(tier, number) for number in range(6)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        signal.signal(signal.SIGXFSZ, ignored)
    assert stored[:3] == [True] * 3
    assert stored[3] is False
    assert stored[4:] == [True] * 2
    assert [await reads(tier, number) for number in (2, 4, 5)] == [True] * 3
    tier.check()
    await tier.close()


async def test_a_cancelled_read_leaves_the_slot_free_to_be_used(tmp_path):
    tier = await open_tier(tmp_path, num_slots=1)
    await write(tier, 1)
    task = asyncio.ensure_future(tier.read(name_of(1), page_aligned(BLOCK_BYTES)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tier.accounts().held == 0
    assert await write(tier, 2)
    await tier.close()


async def test_two_processes_cannot_share_a_folder(tmp_path):
    tier = await open_tier(tmp_path)
    with pytest.raises(ConfigError, match=r"disk\.folder"):
        opened(tmp_path, BLOCK_BYTES, 8, ManualClock())
    await tier.close()


def test_a_link_is_not_followed(tmp_path):
    target = tmp_path / "precious"
    target.write_text("do not touch")
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / FILE_NAME).symlink_to(target)
    with pytest.raises(ConfigError, match=os.strerror(errno.ELOOP)):
        opened(tmp_path / "tier", BLOCK_BYTES, 8, ManualClock())
    assert target.read_text() == "do not touch"


def test_no_damaged_header_is_believed():
    header = RecordHeader(name_of(1), BLOCK_BYTES, 3, 4, 5)
    data = bytearray(encode_header(header))
    assert header_or_none(data) == header
    for bit in range(68 * 8):
        data[bit // 8] ^= 1 << bit % 8
        assert header_or_none(data) is None
        data[bit // 8] ^= 1 << bit % 8
    for length in range(68):
        assert header_or_none(data[:length]) is None


def killed_writers(folder, kills, seed):
    command = [sys.executable, "-m", "tests.kvstore.disk_writer", str(folder), str(kills), str(seed)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=True)
    return [tuple(map(int, line.split())) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.full)])
async def test_a_writer_killed_at_random_points_leaves_no_wrong_byte(tmp_path, kills):
    rounds = killed_writers(tmp_path, kills, seed=kills)
    assert len(rounds) == kills
    assert not any(wrong for _, wrong, _ in rounds)
    assert sum(right for right, _, _ in rounds) > 10 * kills
    tier = opened(tmp_path, BLOCK_BYTES, 64, ManualClock())
    await tier.recover()
    right, wrong, _ = await read_back(tier)
    assert (right > 0, wrong) == (True, 0)
    await tier.close()


@pytest.mark.parametrize("seed", range(4))
async def test_random_histories_with_restarts_agree_with_a_naive_model(tmp_path, seed):
    rng = random.Random(seed)
    tier, held = await open_tier(tmp_path, num_slots=6), []
    for _ in range(120):
        act, number = rng.random(), rng.randrange(10)
        if act < 0.5:
            assert await write(tier, number)
            held = [other for other in held if other != number] + [number]
            held = held[-6:]
        elif act < 0.85:
            assert await reads(tier, number) == (number in held)
            if number in held:
                held = [other for other in held if other != number] + [number]
        elif act < 0.95:
            await tier.forget(name_of(number))
            held = [other for other in held if other != number]
        else:
            await tier.close()
            tier = await open_tier(tmp_path, num_slots=6)
            # The order is that of writing again.
            assert set(tier.hashes) == {name_of(other) for other in held}
            held = [next(n for n in range(10) if name_of(n) == block_hash) for block_hash in tier.hashes]
        tier.check()
    await tier.close()


class FullDisk(SimDisk):
    """A disk with room for so many slots."""

    def __init__(self, num_slots):
        super().__init__(random.Random(0), DiskFaults())
        self.make_room(num_slots)
        self.num_tries = 0

    def make_room(self, num_slots):
        self.faults = DiskFaults(capacity_pages=num_slots * SLOT_BYTES // PAGE_BYTES)

    def write(self, offset, parts):
        self.num_tries += 1
        return super().write(offset, parts)


async def stored(tier, numbers):
    """Write blocks one after the other; return those that are stored."""
    kept = [number for number in numbers if await write(tier, number)]
    tier.check()
    return kept


async def test_a_disk_that_was_full_grows_again_when_there_is_room():
    disk, clock = FullDisk(3), ManualClock()
    tier = DiskTier(disk, BLOCK_BYTES, 8, clock)
    assert await stored(tier, range(4)) == [0, 1, 2]
    assert tier.is_full
    assert await stored(tier, range(4, 7)) == [4, 5, 6]  # in the places of the first three
    assert len(tier.hashes) == 3
    disk.make_room(8)
    assert await stored(tier, [7]) == [7]
    assert len(tier.hashes) == 3
    clock.advance(1.0)
    assert await stored(tier, range(10, 15)) == list(range(10, 15))
    assert (len(tier.hashes), tier.is_full) == (8, False)
    assert tier.accounts().bad == 0
    await tier.close()


async def test_a_full_disk_is_tried_ever_more_seldom():
    disk, clock = FullDisk(1), ManualClock()
    tier = DiskTier(disk, BLOCK_BYTES, 8, clock)
    await stored(tier, range(2))
    waits_s, waited_s = [], 0.0
    for number in range(2, 2000):
        clock.advance(1.0)
        waited_s += 1.0
        if not await write(tier, number):
            waits_s.append(waited_s)
            waited_s = 0.0
    assert waits_s[:9] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]
    assert set(waits_s[9:]) == {MAX_REST_S}
    tier.check()
    await tier.close()


async def test_writes_under_way_together_when_the_disk_is_full_lose_no_slot():
    disk, clock = FullDisk(2), ManualClock()
    tier = DiskTier(disk, BLOCK_BYTES, 8, clock)
    assert sum(await asyncio.gather(*(write(tier, number) for number in range(8)))) == 2
    tier.check()
    disk.make_room(8)
    for number in range(10, 20):
        clock.advance(1.0)
        await write(tier, number)
    tier.check()
    assert (len(tier.hashes), tier.accounts().bad) == (8, 0)
    await tier.close()
