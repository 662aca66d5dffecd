"""The cuda_ipc transport: memory of GPUs of one host, and their hosts' shared memory.

A batch is one launch of `transfer/kernels/copy_ranges.py` on our GPU, straight from our
blocks to the peer's, with nothing staged, or one call of its copy engines (`copy_engine.py`)
where host memory has a part in it. Each side is memory of a GPU (the peer's imported by CUDA
IPC) or shared host memory (pinned here at first use).

* A handle is opened with the index of *our* device, not of the owner's: torch then takes
  the memory for local, and the copy goes over NVLink. Opened with the owner's index, it
  is staged through the host at a tenth of the rate (369 against 38 GB/s, two H200).
* The owner must outlive its importers, and does: a peer that ended is dropped.
* Whoever calls has seen to it that the bytes are there: work on other streams that
  writes the source has ended.
* The event loop plans, fills the row table and launches, because it owns the batch and all
  of it together takes less than the copy; a thread waits for the end, without the
  interpreter.

The peer's grant is held on its board for the length of the copy, as over shared memory.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import torch

from base.errors import ProtocolError, StaleError, TransferFailedError
from base.grants import Grant, Operation, PeerDescriptor
from transfer import copy_engine
from transfer import segment as segments
from transfer.batch import Pieces, Priority
from transfer.completion import Completion
from transfer.kernels.copy_ranges import ALIGNMENT, copy_ranges
from transfer.mapped import MappedPeer, MappedPeers
from transfer.segment import DeviceMemory, Segment

ROW_BYTES = 1 << 20
"""Longest range of one row: a longer one is cut, or its tiles outnumber everything else's."""
MAX_LAUNCHES = 8
"""Under way on one GPU. While one batch is copied the next are planned, and several keep the
link full where one ends and the next begins."""
_SLOT_ROWS = 4096
_CUDA_HOST_REGISTER_MAPPED = 2
_ALREADY_REGISTERED = 712

T = TypeVar("T")


def described(tensor: torch.Tensor) -> DeviceMemory:
    """Return what `TransferAgent.register_device` needs of a contiguous CUDA tensor."""
    if not tensor.is_cuda or not tensor.is_contiguous():
        raise ValueError("a contiguous CUDA tensor is wanted")
    storage = tensor.untyped_storage()
    parts = storage._share_cuda_()  # type: ignore[no-untyped-call]
    skipped_bytes = tensor.data_ptr() - storage.data_ptr()
    coded = [
        {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part for part in parts
    ]
    told = {"parts": coded, "skipped_bytes": skipped_bytes, "address": tensor.data_ptr()}
    handle = json.dumps(told).encode()
    num_bytes = tensor.numel() * tensor.element_size()
    return DeviceMemory(tensor.data_ptr(), num_bytes, tensor.device.index, handle)


class CudaTransport:
    """Owns imported memory, pinned mappings and the threads that wait. The event loop launches."""

    name = "cuda_ipc"

    def __init__(self) -> None:
        self._peers = MappedPeers()
        self._reach = _Reach()
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="cuda-open")
        self._launchers: dict[int, _Launcher] = {}

    def refusal_or_none(self, peer: PeerDescriptor, segment_id: int, device: int | None) -> str | None:
        if not torch.cuda.is_available():
            return "this process has no GPU"
        if peer.address_or_none(self.name) is None:
            return "the peer does not offer it"
        try:
            board = self._peers.mapped(peer).board
        except TransferFailedError as error:
            return str(error)
        if board.shows(segment_id, on_device=True):
            return None
        if device is None or not board.shows(segment_id, on_device=False):
            return "no side is a GPU's memory that is shown"
        return None

    async def move(self, peer: PeerDescriptor, grant: Grant, pieces: Pieces, priority: Priority) -> None:
        mapped = self._peers.mapped(peer)
        mapped.num_copies += 1
        try:
            with mapped.board.held(grant):
                await self._copy(mapped, grant, pieces)
        finally:
            mapped.num_copies -= 1
        if mapped.is_dead():
            raise TransferFailedError("the peer's process ended during the copy")

    async def close(self) -> None:
        await asyncio.to_thread(self._opener.shutdown)
        for launcher in self._launchers.values():
            launcher.close()
        self._reach.close()
        self._peers.close()

    async def _copy(self, mapped: MappedPeer, grant: Grant, pieces: Pieces) -> None:
        device = pieces.segment.device
        device = torch.cuda.current_device() if device is None else device
        reached = self._reach.known_or_none(mapped, grant.segment_id, pieces.segment, device)
        if reached is None:
            # Compiling and pinning take seconds, which must not stop the loop.
            opening = functools.partial(self._opened, mapped, grant.segment_id, pieces.segment, device)
            reached = await _result(self._opener.submit(opening))
        if int((pieces.peer_offsets + pieces.lengths).max()) > reached.num_bytes:
            raise StaleError("the peer's segment has another size")
        try:
            by_engine = reached.is_host or pieces.segment.device is None
            await self._launchers[device].copy(grant.operation, pieces, reached.address, by_engine)
        except RuntimeError as error:
            raise TransferFailedError(f"the GPU gave up: {error}") from error

    def _opened(self, mapped: MappedPeer, segment_id: int, ours: Segment, device: int) -> _Imported:
        if device not in self._launchers:
            self._launchers[device] = _Launcher(device)
        return self._reach.opened(mapped, segment_id, ours, device)


async def _result(running: Future[T]) -> T:
    """Return or raise what a thread does, and never before it is done."""
    completion = Completion()
    running.add_done_callback(lambda done: completion.end(done.exception()))
    await completion.wait(_cannot_be_cancelled)
    return running.result()


def _cannot_be_cancelled() -> None:
    """A launch ends within milliseconds, and cannot be taken back."""


class _Launcher:
    """Owns the slots of one GPU and the thread that waits for their ends, in order."""

    def __init__(self, device: int) -> None:
        self._free = [_Slot(device) for _ in range(MAX_LAUNCHES)]
        self._free[0].compile()
        self._room = asyncio.Semaphore(MAX_LAUNCHES)
        # An executor and its futures cost 20 us a batch, a tenth of 64 MiB over NVLink.
        self._launched: SimpleQueue[tuple[_Slot, Completion] | None] = SimpleQueue()
        self._waiter = threading.Thread(target=self._wait, name="cuda-wait", daemon=True)
        self._waiter.start()

    async def copy(self, operation: Operation, pieces: Pieces, peer_base: int, by_engine: bool) -> None:
        """Copy and return when the bytes are there.

        Args:
            by_engine: Rather than by the kernel, if the pieces are long enough.

        Raises:
            ProtocolError: something is not aligned.
            RuntimeError: CUDA failed.
        """
        async with self._room:
            slot = self._free.pop()
            try:
                slot.launch(operation, pieces, peer_base, by_engine)
                completion = Completion()
                self._launched.put((slot, completion))
                await completion.wait(_cannot_be_cancelled)
            finally:
                self._free.append(slot)

    def close(self) -> None:
        """End the thread."""
        self._launched.put(None)
        self._waiter.join()

    def _wait(self) -> None:
        while (launched := self._launched.get()) is not None:
            slot, completion = launched
            try:
                slot.wait()
            except RuntimeError as error:
                completion.end(error)
            else:
                completion.end(None)


class _Slot:
    """A stream, and the table of the batch that is copied on it."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._make_table(_SLOT_ROWS)

    def launch(self, operation: Operation, pieces: Pieces, peer_base: int, by_engine: bool) -> None:
        """Begin to copy. Raises ProtocolError for what is not aligned."""
        by_engine = by_engine and copy_engine.suits(pieces.num_bytes, len(pieces))
        if not by_engine:
            pieces = pieces.cut(ROW_BYTES)
        num_rows = len(pieces)
        if 3 * num_rows > len(self._cells):
            self._make_table(2 * num_rows)
        table = self._cells[: 3 * num_rows].reshape(3, num_rows)
        ours, theirs = table[:2] if operation is Operation.WRITE else table[1::-1]
        np.add(pieces.offsets, pieces.segment.address, out=ours)
        np.add(pieces.peer_offsets, peer_base, out=theirs)
        table[2] = pieces.lengths
        if int(np.bitwise_or.reduce(table, axis=None)) % ALIGNMENT:
            raise ProtocolError(f"GPU copies are of multiples of {ALIGNMENT} bytes")
        with torch.cuda.device(self._device):
            if by_engine:
                copy_engine.copy(table[0], table[1], table[2], self._stream.cuda_stream)
                self._event.record(self._stream)
            else:
                self._run(num_rows, int(pieces.lengths.max()))

    def wait(self) -> None:
        """Wait for the end, without the interpreter."""
        self._event.synchronize()

    def compile(self) -> None:
        """Have the kernel ready: copy one row of no bytes."""
        self._cells[:3] = 0
        with torch.cuda.device(self._device):
            self._run(1, ALIGNMENT)
        self.wait()

    def _run(self, num_rows: int, max_bytes: int) -> None:
        # Not `with torch.cuda.stream(...)`, which takes 17 us of the 186 a batch has.
        before = torch.cuda.current_stream()
        torch.cuda.set_stream(self._stream)
        try:
            table = self._table[: 3 * num_rows]
            # Left in pinned memory it makes 16 KiB rows come to 336 GB/s instead of 362.
            table.copy_(self._staged[: 3 * num_rows], non_blocking=True)
            copy_ranges(table, num_rows, max_bytes)
            self._event.record(self._stream)
        finally:
            torch.cuda.set_stream(before)

    def _make_table(self, num_rows: int) -> None:
        self._staged = torch.empty(3 * num_rows, dtype=torch.int64, pin_memory=True)
        self._cells = self._staged.numpy()
        self._table = torch.empty(3 * num_rows, dtype=torch.int64, device=self._device)


class _Reach:
    """What of the peers' memory and of our own this process's GPUs can address.

    One thread changes it; the event loop looks into it.
    """

    def __init__(self) -> None:
        self._imported: dict[tuple[int, int, int], _Imported] = {}
        self._pinned: dict[int, int] = {}

    def known_or_none(
        self, mapped: MappedPeer, segment_id: int, ours: Segment, device: int
    ) -> _Imported | None:
        """Return the peer's memory if it, and ours, can be addressed already."""
        if ours.device is None and ours.address not in self._pinned:
            return None
        return self._imported.get((mapped.epoch, segment_id, device))

    def opened(self, mapped: MappedPeer, segment_id: int, ours: Segment, device: int) -> _Imported:
        """Return the peer's memory, imported or pinned; pin ours. Raises TransferFailedError."""
        key = (mapped.epoch, segment_id, device)
        with torch.cuda.device(device):
            if ours.device is None and ours.address not in self._pinned:
                self._pin(ours.address, ours.num_bytes)
            if key not in self._imported:
                self._drop_dead()
                self._imported[key] = self._open(mapped, segment_id, device)
        return self._imported[key]

    def close(self) -> None:
        self._imported.clear()
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._pinned.clear()

    def _open(self, mapped: MappedPeer, segment_id: int, device: int) -> _Imported:
        if mapped.board.shows(segment_id, on_device=True):
            return _import(mapped, segment_id, device)
        memory = mapped.board.memory_of(segment_id)
        address = segments.address_of(memory)
        self._pin(address, memory.nbytes)
        return _Imported(mapped, address, memory.nbytes, memory)

    def _drop_dead(self) -> None:
        """Let go of what processes left behind that ended."""
        for key, imported in list(self._imported.items()):
            if imported.owner.is_dead():
                del self._imported[key]
                if self._pinned.pop(imported.address, None) is not None:
                    torch.cuda.cudart().cudaHostUnregister(imported.address)  # type: ignore[no-untyped-call]

    def _pin(self, address: int, num_bytes: int) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(address, num_bytes, _CUDA_HOST_REGISTER_MAPPED))
        if code not in (0, _ALREADY_REGISTERED):
            raise TransferFailedError(f"{num_bytes} bytes cannot be pinned: CUDA error {code}")
        self._pinned[address] = num_bytes


class _Imported:
    """Memory of a peer as an address of ours; keeps what must live as long."""

    def __init__(
        self, owner: MappedPeer, address: int, num_bytes: int, kept: torch.UntypedStorage | memoryview | None
    ) -> None:
        self.owner = owner
        self.address = address
        self.num_bytes = num_bytes
        self.is_host = isinstance(kept, memoryview)
        self._kept = kept


def _import(mapped: MappedPeer, segment_id: int, device: int) -> _Imported:
    coded = json.loads(mapped.board.handle_of(segment_id))
    num_bytes = mapped.board.num_bytes_of(segment_id)
    if mapped.board.pid == os.getpid():  # a node that hands off to itself: CUDA refuses to import
        return _Imported(mapped, coded["address"], num_bytes, None)
    parts = [base64.b64decode(part["bytes"]) if isinstance(part, dict) else part for part in coded["parts"]]
    try:
        storage = torch.UntypedStorage._new_shared_cuda(device, *parts[1:])
    except RuntimeError as error:
        raise TransferFailedError(f"the peer's GPU memory cannot be imported: {error}") from error
    address = storage.data_ptr() + coded["skipped_bytes"]
    return _Imported(mapped, address, num_bytes, storage)
