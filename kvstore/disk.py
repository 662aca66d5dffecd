"""The disk tier: blocks that left host memory, in equal slots of one file.

Owns one file and the map from block hash to slot. All blocks of a store have one size, so
a slot is a header and a payload, and an evicted block's slot is the next block's: no
compaction as with a log, no name, rename and directory flush per block as with a file
for each. Nothing a client sent is ever part of a name: there is one, `blocks.slots`.

A read or write is one system call past the page cache (the pool above *is* the cache),
on threads of its own, straight from and into the pool's memory. Nothing is flushed: after
a crash each record proves itself (`record.py`), and one that cannot is a miss.

Failure is a miss. A write that fails where the file would have grown, or for want of room,
stops its growth for a while (`base/resting.py`), and blocks are overwritten where they are;
one that fails elsewhere ends the use of its slot. No OSError leaves this file after it has
been opened.

The event loop owns all maps; threads are given a slot that nobody else touches meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import stat
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from base.block_hash import BlockHash
from base.checksum import checksum
from base.clock import Clock
from base.errors import ConfigError
from base.logs import event
from base.resting import Resting
from base.uninterrupted import uninterrupted
from kvstore.record import HEADER_BYTES, RecordHeader, encode_header, header_or_none

log = logging.getLogger(__name__)

FILE_NAME = "blocks.slots"
NUM_THREADS = 16
"""Requests that a disk has queued: as many as it likes to have."""
MAX_PENDING_WRITES = 64
"""More would let memory wait for the disk; a block beyond it is dropped instead."""
PAGE_BYTES = 4096
MIN_REST_S = 1.0
MAX_REST_S = 300.0
"""The rests of a file that could not grow, the first and the longest."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


@dataclass(slots=True)
class _Slot:
    index: int
    checksum: int
    readers: int = 0


@dataclass(frozen=True, slots=True)
class DiskAccounts:
    """How many slots are in each place; the first four and `bad` add up to `total`."""

    free: int
    in_transfer: int
    cached: int
    held: int
    bad: int
    total: int


class DirectFile:
    """A file that is read and written past the page cache where the memory allows it.

    Any thread; all but `close` may raise OSError.
    """

    def __init__(self, fd: int, direct_fd: int) -> None:
        """`direct_fd`: the same file opened for that; `fd` again where it cannot be."""
        self._fd = fd
        self._direct_fd = direct_fd

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def write(self, offset: int, parts: Sequence[memoryview]) -> int:
        """Write `parts` one after the other; return how many bytes were written."""
        return os.pwritev(self._fd_for(parts), parts, offset)

    def read(self, offset: int, parts: Sequence[memoryview]) -> int:
        """Fill `parts` one after the other; return how many bytes came."""
        return os.preadv(self._fd_for(parts), parts, offset)

    def close(self) -> None:
        os.close(self._fd)
        if self._direct_fd != self._fd:
            os.close(self._direct_fd)

    def _fd_for(self, parts: Sequence[memoryview]) -> int:
        return self._direct_fd if all(_is_direct(part) for part in parts) else self._fd


def _is_direct(memory: memoryview) -> bool:
    """Only whole pages at page boundaries may go past the page cache."""
    if memory.nbytes % PAGE_BYTES or memory.readonly:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) % PAGE_BYTES == 0


class DiskTier:
    """Blocks on one disk, found by hash. Use `opened`, then `close`."""

    def __init__(self, file: DirectFile, block_bytes: int, num_slots: int, clock: Clock) -> None:
        self._file = file
        self._block_bytes = block_bytes
        self._slot_bytes = _slot_bytes(block_bytes)
        self._num_slots = num_slots
        self._slots: OrderedDict[BlockHash, _Slot] = OrderedDict()
        self._free: deque[int] = deque()
        self._num_used = 0
        """Slots the file has ever had; the next new one."""
        self._resting = Resting(clock, MIN_REST_S, MAX_REST_S)
        """Holds the file's name while the file is not to grow."""
        self._growing: set[int] = set()
        """Slots that are being written for the first time."""
        self._unwritten: deque[int] = deque()
        """Slots that there was no room for."""
        self._num_bad = 0
        self._num_held = 0
        self._writing: set[BlockHash] = set()
        self._num_erasing = 0
        self._sequence = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="disk")
        self.damaged = 0
        """Records that were found not to be what was written."""
        self.evicted: list[BlockHash] = []
        """Names forgotten since the owner last emptied this list."""

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._slots

    @property
    def is_full(self) -> bool:
        """Whether a write found no room, and none tries again yet."""
        return FILE_NAME in self._resting

    @property
    def hashes(self) -> list[BlockHash]:
        """Return what is stored, the next to be evicted first."""
        return list(self._slots)

    def start(self) -> None:
        """Have all threads now: work that finds none later would fail, and yet stand in line for the others.

        Raises:
            RuntimeError: there are not so many to be had.
        """
        begun = threading.Barrier(NUM_THREADS)
        try:
            for _ in range(NUM_THREADS):
                self._threads.submit(begun.wait)
        except RuntimeError:
            begun.abort()
            self._threads.shutdown()
            raise

    async def recover(self) -> int:
        """Read the headers that a process before us wrote; return the blocks found."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, self._scan)
        self._num_used = len(found)
        for index, header in found:
            if header is None:
                self._free.append(index)
            else:
                old = self._slots.pop(header.block_hash, None)
                if old is not None:
                    self._num_erasing += 1
                    await self._erase(old.index)
                self._slots[header.block_hash] = _Slot(index, header.checksum)
                self._sequence = max(self._sequence, header.sequence)
        return len(self._slots)

    async def write(self, block_hash: BlockHash, payload: memoryview, block_checksum: int) -> bool:
        """Store a block; return whether it is stored. `payload` must not change meanwhile.

        `block_checksum` is given back by `read`; of which kind it is does not matter here.
        """
        if payload.nbytes != self._block_bytes:
            raise ValueError(f"a block has {self._block_bytes} bytes, not {payload.nbytes}")
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return True
        if block_hash in self._writing or len(self._writing) >= MAX_PENDING_WRITES:
            return False
        index = self._take_slot()
        if index is None:
            return False
        self._writing.add(block_hash)
        self._sequence += 1
        # The thread uses the slot and the payload to its end, cancelled or not.
        return await uninterrupted(self._write(index, self._sequence, block_hash, payload, block_checksum))

    async def read(self, block_hash: BlockHash, into: memoryview) -> int | None:
        """Read a block into memory and return the checksum it was written with.

        None: a miss, and `into` holds anything. A damaged record is forgotten.
        """
        slot = self._slots.get(block_hash)
        if slot is None:
            return None
        self._slots.move_to_end(block_hash)
        slot.readers += 1
        self._num_held += slot.readers == 1
        return await uninterrupted(self._read(slot, block_hash, into))

    async def forget(self, block_hash: BlockHash) -> bool:
        """Forget a block that nobody reads, on disk too; return whether it is gone."""
        slot = self._slots.get(block_hash)
        if slot is not None and slot.readers == 0:
            del self._slots[block_hash]
            self.evicted.append(block_hash)
            self._num_erasing += 1
            await uninterrupted(self._erase(slot.index))
        return block_hash not in self._slots

    def accounts(self) -> DiskAccounts:
        """Return where all slots are."""
        return DiskAccounts(
            free=len(self._free) + len(self._unwritten) + self._num_slots - self._num_used,
            in_transfer=len(self._writing) + self._num_erasing,
            cached=len(self._slots) - self._num_held,
            held=self._num_held,
            bad=self._num_bad,
            total=self._num_slots,
        )

    def check(self) -> None:
        """Assert that every slot is in one place."""
        used = [*self._free, *self._unwritten, *(slot.index for slot in self._slots.values())]
        assert len(used) == len(set(used)), "a slot is in two places"
        assert self._num_held == sum(slot.readers > 0 for slot in self._slots.values())
        books = self.accounts()
        parts = books.free + books.in_transfer + books.cached + books.held + books.bad
        assert parts == books.total, f"a slot is lost: {books}"

    async def close(self) -> None:
        """Wait for what is under way and close the file."""
        await asyncio.to_thread(self._threads.shutdown)
        self._file.close()

    async def _write(
        self, index: int, sequence: int, block_hash: BlockHash, payload: memoryview, block_checksum: int
    ) -> bool:
        loop = asyncio.get_running_loop()

        def write() -> int:
            length, whole = self._block_bytes, checksum(payload)
            header = RecordHeader(block_hash, length, sequence, block_checksum, whole)
            return self._write_slot(index, encode_header(header), payload)

        error_number = await loop.run_in_executor(self._threads, write)
        self._writing.discard(block_hash)
        if error_number:
            self._give_up(index, error_number)
            return False
        self._slots[block_hash] = _Slot(index, block_checksum)
        if index in self._growing:
            self._growing.discard(index)
            self._resting.succeeded(FILE_NAME)
        return True

    async def _read(self, slot: _Slot, block_hash: BlockHash, into: memoryview) -> int | None:
        loop = asyncio.get_running_loop()
        is_whole = await loop.run_in_executor(self._threads, self._read_slot, slot.index, block_hash, into)
        slot.readers -= 1
        self._num_held -= slot.readers == 0
        if is_whole:
            return slot.checksum
        self.damaged += 1
        event(log, "damaged record", level=logging.WARNING, slot=slot.index)
        await self.forget(block_hash)
        return None

    async def _erase(self, index: int) -> None:
        """Free a slot, which `_num_erasing` counts, once no process after us would find its record."""
        loop = asyncio.get_running_loop()
        try:
            erased = loop.run_in_executor(self._threads, self._write_slot, index, bytes(HEADER_BYTES))
            error_number = await erased
        except RuntimeError:  # closed since: whoever opens it next finds the record
            error_number = errno.EBADF
        self._num_erasing -= 1
        if error_number:
            self._give_up(index, error_number)
        else:
            self._free.append(index)

    # --- slots --------------------------------------------------------------------------

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.popleft()
        if (self._unwritten or self._num_used < self._num_slots) and not self.is_full:
            index = self._unwritten.popleft() if self._unwritten else self._num_used
            self._num_used = max(self._num_used, index + 1)
            self._growing.add(index)
            return index
        for block_hash, slot in self._slots.items():
            if slot.readers == 0:
                del self._slots[block_hash]
                self.evicted.append(block_hash)
                return slot.index
        return None

    def _give_up(self, index: int, error_number: int) -> None:
        event(log, "disk write failed", level=logging.WARNING, slot=index, error=os.strerror(error_number))
        if index in self._growing or error_number in NO_ROOM:
            self._growing.discard(index)
            self._unwritten.append(index)
            if self._resting.failed(FILE_NAME) is not None:
                event(log, "disk is full for now", level=logging.WARNING, blocks=len(self._slots))
        else:
            self._num_bad += 1

    def _scan(self) -> list[tuple[int, RecordHeader | None]]:
        """Return each slot of the file with its header, the oldest record first."""
        try:
            size = self._file.size()
        except OSError:
            return []
        count = min(-(-size // self._slot_bytes), self._num_slots)
        found = [(index, self._header_of(index)) for index in range(count)]
        return sorted(found, key=lambda item: item[1].sequence if item[1] else 0)

    def _header_of(self, index: int) -> RecordHeader | None:
        # At no page's boundary, so that it goes by the page cache, which reads ahead.
        page = memoryview(bytearray(HEADER_BYTES + 1))[1:]
        try:
            self._file.read(index * self._slot_bytes, [page])
        except OSError:
            return None
        header = header_or_none(page)
        return header if header is not None and header.length == self._block_bytes else None

    # --- on threads ---------------------------------------------------------------------

    def _write_slot(self, index: int, header: bytes, *payload: memoryview) -> int:
        """Return 0, or the number of the error."""
        try:
            page = memoryview(mmap.mmap(-1, HEADER_BYTES))
            page[:] = header
            parts = [page, *payload]
            written = self._file.write(index * self._slot_bytes, parts)
        except OSError as error:
            return error.errno or errno.EIO
        return 0 if written == sum(part.nbytes for part in parts) else errno.ENOSPC

    def _read_slot(self, index: int, block_hash: BlockHash, into: memoryview) -> bool:
        try:
            page = memoryview(mmap.mmap(-1, HEADER_BYTES))
            count = self._file.read(index * self._slot_bytes, [page, into])
        except OSError:
            return False
        header = header_or_none(page)
        return (
            count == HEADER_BYTES + self._block_bytes
            and header is not None
            and header.block_hash == block_hash
            and header.payload_xxh3 == checksum(into)
        )


def opened(folder: Path, block_bytes: int, num_slots: int, clock: Clock) -> DiskTier:
    """Open or make the slots in `folder`, which is ours alone while they are open; those beyond go.

    Raises:
        ConfigError: it cannot be opened, is no plain file of ours, or is in use; or there are no threads.
    """
    fds: list[int] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fds.append(_open_file(folder_fd, 0))
            with contextlib.suppress(OSError):  # some file systems have a page cache only
                fds.append(_open_file(folder_fd, os.O_DIRECT))
        finally:
            os.close(folder_fd)
        fcntl.flock(fds[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        state = os.fstat(fds[0])
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_nlink != 1:
            raise OSError(errno.EPERM, "not a plain file of this user alone")
        os.ftruncate(fds[0], min(state.st_size, num_slots * _slot_bytes(block_bytes)))
    except OSError as error:
        for fd in fds:
            os.close(fd)
        raise ConfigError(f"disk.folder: {folder / FILE_NAME}: {error.strerror}") from error
    file = DirectFile(fds[0], fds[-1])
    tier = DiskTier(file, block_bytes, num_slots, clock)
    try:
        tier.start()
    except RuntimeError as error:
        file.close()
        raise ConfigError(f"disk.folder: no threads for {folder / FILE_NAME}: {error}") from error
    return tier


def _slot_bytes(block_bytes: int) -> int:
    return HEADER_BYTES + -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


def _open_file(folder_fd: int, flag: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flag
    return os.open(FILE_NAME, flags, 0o600, dir_fd=folder_fd)
