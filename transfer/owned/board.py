"""The board: shared memory on which a process shows peers of its host what they may touch.

A writer over shared memory copies into the owner's pages itself, so nobody stands
between it and them. What keeps it honest is this:

    owner   post      digest, then the generation          (slot was free)
            close     generation := 0, then ended, reason
            drain     exclusive lock on the slot's byte    (waits for copies under way)
    writer  hold      shared lock on the slot's byte; the generation must be the grant's

The locks are the kernel's open-file-description locks. They order the two stores and
loads between processors, which Python cannot, and the kernel drops those of a writer
that died, so that the dead delay nobody. A counter in shared memory was weighed: it
needs atomic instructions, and a writer that dies holding it blocks the owner until the
lease ends. A lock and its release cost 1.7 us together (2.5 GHz Xeon, 2026-11-21).

A writer that is frozen in the middle of a copy keeps `drain` waiting for as long as it
may still wake up and go on: that memory cannot be given to anybody else.

Layout, in 8-byte words: header {magic, epoch}; MAX_SEGMENTS x {segment id, fd, bytes, 1
if it is memory of a GPU: then the fd holds what it is imported by};
NUM_SLOTS x {generation, digest, ended generation, reason}.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import functools
import mmap
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from base.checksum import checksum
from base.errors import LeaseExpiredError, ProtocolError, StaleError, TransferFailedError
from base.grants import Grant
from transfer.owned.grant import NUM_SLOTS, SLOT_MASK, GrantState
from transfer.owned.segment import Segment, address_of

MAX_SEGMENTS = 64
RETRY_S = 0.1
_MAGIC = 0x436F6E6475637431
_SEGMENTS_AT = 2
_SLOTS_AT = _SEGMENTS_AT + 4 * MAX_SEGMENTS
_NUM_WORDS = _SLOTS_AT + 4 * NUM_SLOTS
_MEMFD_NAME = "conductor-board"
_FLOCK = struct.Struct("hhqqi4x")
"""struct flock of 64-bit Linux; l_pid must be 0 for locks of this sort."""


@functools.lru_cache(256)
def digest_of(grant: Grant) -> int:
    """Return a checksum over all that a grant allows: a peer cannot widen it by mistake."""
    words = [grant.segment_id, grant.operation.value, grant.length, *grant.offsets]
    return checksum(array.array("Q", words).tobytes())


class Board:
    """Owner's side. The event loop calls everything."""

    def __init__(self, epoch: int) -> None:
        self._fd = os.memfd_create(_MEMFD_NAME, os.MFD_CLOEXEC)
        os.ftruncate(self._fd, 8 * _NUM_WORDS)
        self._words = memoryview(mmap.mmap(self._fd, 8 * _NUM_WORDS)).cast("Q")
        self._words[1] = epoch
        self._words[0] = _MAGIC
        self._num_shown = 0
        self.address = f"{_boot_id()}:{os.getpid()}:{self._fd}"
        """Where peers of this host find the board."""

    def show(self, segment: Segment) -> None:
        """Let peers map a shared segment.

        Raises:
            ValueError: the segment is private, or MAX_SEGMENTS are shown.
        """
        if self._num_shown == MAX_SEGMENTS or segment.shared_fd is None:
            raise ValueError(f"only shared segments can be shown, and at most {MAX_SEGMENTS}")
        at = _SEGMENTS_AT + 4 * self._num_shown
        self._num_shown += 1
        self._words[at + 1] = segment.shared_fd
        self._words[at + 2] = segment.num_bytes
        self._words[at + 3] = segment.device is not None
        self._words[at] = segment.segment_id

    def post(self, grant: Grant) -> None:
        """Open a grant to the peers of this host."""
        at = _SLOTS_AT + 4 * (grant.generation & SLOT_MASK)
        self._words[at + 1] = digest_of(grant)
        self._words[at] = grant.generation

    def close_slot(self, generation: int, state: GrantState) -> None:
        """Refuse this grant to whoever asks from now on, with the reason."""
        at = _SLOTS_AT + 4 * (generation & SLOT_MASK)
        if self._words[at] == generation:
            self._words[at] = 0
            self._words[at + 2] = generation
            self._words[at + 3] = state.value

    def drain(self, generation: int, done: Callable[[], None]) -> None:
        """Call `done` when no copy under this closed grant is under way.

        At once if there is none; otherwise from a thread of its own, because the kernel
        offers no other way to wait for a lock. Where there is no thread to be had or no descriptor,
        the copy is looked for again a little later.
        """
        slot = generation & SLOT_MASK
        if self._try_drain(slot):
            done()
            return
        try:
            _start_waiting(self._fd, slot, done)
        except (OSError, RuntimeError):
            asyncio.get_running_loop().call_later(RETRY_S, self._drain_again, generation, done)

    def close(self) -> None:
        """Refuse everything, for ever."""
        for slot in range(NUM_SLOTS):
            self._words[_SLOTS_AT + 4 * slot] = 0
        self._words[0] = 0
        os.close(self._fd)

    def _drain_again(self, generation: int, done: Callable[[], None]) -> None:
        # The descriptor of a board that was closed is somebody else's.
        if self._words[0] == _MAGIC:
            self.drain(generation, done)

    def _try_drain(self, slot: int) -> bool:
        try:
            _lock(self._fd, slot, fcntl.F_WRLCK, wait=False)
        except BlockingIOError:
            return False
        _lock(self._fd, slot, fcntl.F_UNLCK, wait=False)
        return True


class PeerBoard:
    """A peer's board and its segments, mapped. Any thread may call anything but `close`."""

    def __init__(self, address: str, epoch: int) -> None:
        """Map the board at `address`.

        Raises:
            TransferFailedError: no board of that epoch is there: another host, another
                user, or the process ended.
        """
        self._pid, fd = _board_on_this_host(address)
        self._fd = _open_memfd(self._pid, fd, os.O_RDONLY, _MEMFD_NAME)
        try:
            if os.fstat(self._fd).st_size != 8 * _NUM_WORDS:
                raise TransferFailedError("the peer's board is of another version")
            board = mmap.mmap(self._fd, 8 * _NUM_WORDS, prot=mmap.PROT_READ)
            self._words = memoryview(board).cast("Q")
            if self._words[0] != _MAGIC or self._words[1] != epoch:
                raise TransferFailedError("the peer of that epoch is gone from this host")
        except BaseException:
            os.close(self._fd)
            raise
        self._segments: dict[int, memoryview] = {}
        self._map_lock = threading.Lock()
        self._rows: dict[int, int] = {}
        self._holds: dict[int, int] = {}
        self._holds_lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._pid

    def shows(self, segment_id: int, on_device: bool) -> bool:
        """Return whether the peer shows this segment, as host memory or as a GPU's."""
        row = self._row_or_none(segment_id)
        return row is not None and bool(self._words[row + 3]) is on_device

    def num_bytes_of(self, segment_id: int) -> int:
        """Return a segment's size; raises StaleError if the peer shows none of that id."""
        return self._words[self._row(segment_id) + 2]

    def memory_of(self, segment_id: int) -> memoryview:
        """Return the peer's host memory, mapped; raises StaleError if it shows none of that id."""
        memory = self._segments.get(segment_id)
        if memory is None:
            # Mapped once: what two threads mapped, the loser would unmap under the other's address.
            with self._map_lock:
                memory = self._segments.get(segment_id)
                if memory is None:
                    memory = self._segments[segment_id] = self._map(self._row(segment_id))
        return memory

    def address_of(self, segment_id: int) -> int:
        """Return where `memory_of` maps a segment in this process; raises as it does."""
        return address_of(self.memory_of(segment_id))

    def handle_of(self, segment_id: int) -> bytes:
        """Return what a GPU's memory is imported by; raises StaleError."""
        fd = _open_memfd(self._pid, self._words[self._row(segment_id) + 1], os.O_RDONLY, "conductor-segment")
        try:
            return os.pread(fd, os.fstat(fd).st_size, 0)
        finally:
            os.close(fd)

    def require_live(self, grant: Grant) -> None:
        """Raise as `hold` does if a grant has ended, or says something else."""
        at = _SLOTS_AT + 4 * (grant.generation & SLOT_MASK)
        if self._words[at] == grant.generation:
            if self._words[at + 1] != digest_of(grant):
                raise ProtocolError(f"grant {grant.generation:#x} says something else")
            return
        if self._words[at + 2] == grant.generation and self._words[at + 3] == GrantState.EXPIRED.value:
            raise LeaseExpiredError(f"the lease of grant {grant.generation:#x} ran out")
        raise StaleError(f"grant {grant.generation:#x} is not live")

    def close(self) -> None:
        """Unmap everything. Nothing may be held."""
        self._segments.clear()
        os.close(self._fd)

    @contextmanager
    def held(self, grant: Grant) -> Iterator[None]:
        """Hold a grant for the length of a `with`; raises as `hold`."""
        self.hold(grant)
        try:
            yield
        finally:
            self.let_go(grant)

    def hold(self, grant: Grant) -> None:
        """Keep the ranges of a live grant from being reused until `let_go`.

        Raises:
            LeaseExpiredError, StaleError: the grant has ended or was never given.
            ProtocolError: the grant is live and says something else.
        """
        slot = grant.generation & SLOT_MASK
        if slot >= NUM_SLOTS:
            raise StaleError(f"no grant {grant.generation:#x}")
        # One lock for the whole process, so threads of it are counted here.
        with self._holds_lock:
            holds = self._holds.get(slot, 0)
            if not holds:
                try:
                    _lock(self._fd, slot, fcntl.F_RDLCK, wait=False)
                except BlockingIOError as error:
                    raise StaleError(f"grant {grant.generation:#x} is being revoked") from error
            self._holds[slot] = holds + 1
        try:
            self.require_live(grant)
        except BaseException:
            self.let_go(grant)
            raise

    def let_go(self, grant: Grant) -> None:
        """End one `hold`."""
        slot = grant.generation & SLOT_MASK
        with self._holds_lock:
            left = self._holds.pop(slot) - 1
            if left:
                self._holds[slot] = left
            else:
                _lock(self._fd, slot, fcntl.F_UNLCK, wait=False)

    def _row_or_none(self, segment_id: int) -> int | None:
        row = self._rows.get(segment_id)
        if row is None:
            for at in range(_SEGMENTS_AT, _SLOTS_AT, 4):
                if self._words[at] == segment_id:
                    row = self._rows[segment_id] = at
                    break
        return row

    def _row(self, segment_id: int) -> int:
        row = self._row_or_none(segment_id)
        if row is None:
            raise StaleError(f"the peer shows no segment {segment_id:#x}")
        return row

    def _map(self, row: int) -> memoryview:
        fd = _open_memfd(self._pid, self._words[row + 1], os.O_RDWR, "conductor-segment")
        num_bytes = self._words[row + 2]
        try:
            memory = memoryview(mmap.mmap(fd, 0))  # whole: huge pages cannot be mapped in part
            if memory.nbytes < num_bytes:
                raise ValueError(f"{memory.nbytes} bytes of {num_bytes}")
            return memory[:num_bytes]
        except (OSError, ValueError) as error:
            raise TransferFailedError(f"the peer's segment cannot be mapped: {error}") from error
        finally:
            os.close(fd)


def _start_waiting(board_fd: int, slot: int, done: Callable[[], None]) -> None:
    fd = os.dup(board_fd)
    waiter = threading.Thread(target=_wait_for_lock, args=(fd, slot, done), name="board-drain", daemon=True)
    try:
        waiter.start()
    except RuntimeError:
        os.close(fd)
        raise


def _wait_for_lock(fd: int, slot: int, done: Callable[[], None]) -> None:
    try:
        _lock(fd, slot, fcntl.F_WRLCK, wait=True)
        _lock(fd, slot, fcntl.F_UNLCK, wait=False)
    finally:
        os.close(fd)
    done()


def _lock(fd: int, slot: int, kind: int, wait: bool) -> None:
    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, slot, 1, 0))


@functools.cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _board_on_this_host(address: str) -> tuple[int, int]:
    """Return the process that has the board at `address`, and the descriptor there."""
    try:
        boot_id, pid, fd = address.split(":")
        if boot_id == _boot_id() and sys.platform == "linux":
            return int(pid), int(fd)
    except ValueError as error:
        raise TransferFailedError(f"{address!r} is no address of shared memory") from error
    except OSError as error:
        raise TransferFailedError(f"this host's boot id cannot be read: {error}") from error
    raise TransferFailedError("the peer is on another host")


def _open_memfd(pid: int, fd: int, flags: int, name: str) -> int:
    path = f"/proc/{pid}/fd/{fd}"
    try:
        # Opening whatever else has that number by now (a pipe, a terminal) has effects.
        if not os.readlink(path).startswith(f"/memfd:{name}"):
            raise TransferFailedError(f"{path} is not shared memory of ours")
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise TransferFailedError(f"the peer's shared memory cannot be opened: {error}") from error
