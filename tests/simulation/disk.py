"""A disk in memory, with what disks do: errors, short writes, no room, flipped bits, and a crash
after which pages that were written are the old ones. It outlives the process that uses it."""

from __future__ import annotations

import errno
from dataclasses import dataclass

PAGE_BYTES = 4096


@dataclass(frozen=True)
class DiskFaults:
    """How likely each is, for each operation."""

    error: float = 0.0
    short: float = 0.0
    flip: float = 0.0
    capacity_pages: int = 1 << 20


class SimDisk:
    """A `kvstore.disk.DirectFile`. Nothing is flushed, so a crash may undo any page since the last."""

    def __init__(self, rng, faults):
        self.faults = faults
        self._rng = rng
        self._pages = {}
        self._before = {}

    def size(self):
        return (max(self._pages, default=-1) + 1) * PAGE_BYTES

    def write(self, offset, parts):
        self._fail()
        data = b"".join(parts)
        written = len(data) // 2 if self._rng.random() < self.faults.short else len(data)
        for start in range(0, written, PAGE_BYTES):
            page = (offset + start) // PAGE_BYTES
            if page >= self.faults.capacity_pages:
                if start:
                    return start
                raise OSError(errno.ENOSPC, "no room")
            self._before.setdefault(page, self._pages.get(page))
            end = min(start + PAGE_BYTES, written)
            rest = self._pages.get(page, b"").ljust(PAGE_BYTES, b"\0")[end - start :]
            self._pages[page] = data[start:end] + rest
        return written

    def read(self, offset, parts):
        self._fail()
        count = 0
        for part in parts:
            page, skipped = divmod(offset + count, PAGE_BYTES)
            found = self._pages.get(page)
            if found is None:
                return count
            assert not skipped
            part[:] = found[: part.nbytes]
            count += part.nbytes
        if self._rng.random() < self.faults.flip:
            parts[-1][self._rng.randrange(parts[-1].nbytes)] ^= 1
        return count

    def close(self):
        pass

    def crash(self):
        """The machine lost power: each page written since the last time is there, or is not."""
        for page, before in self._before.items():
            if self._rng.random() < 0.3:
                if before is None:
                    del self._pages[page]
                else:
                    self._pages[page] = before
        self._before.clear()

    def _fail(self):
        if self._rng.random() < self.faults.error:
            raise OSError(errno.EIO, "input or output error")
