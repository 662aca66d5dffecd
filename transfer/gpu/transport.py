"""The cuda_ipc transport: memory of GPUs of one host, and their hosts' shared memory.

A batch is one launch of `transfer/gpu/kernels/copy_ranges.py` on our GPU, straight from our
blocks to the peer's, with nothing staged, or one call of its copy engines (`copy_engine.py`)
where host memory has a part in it. Each side is memory of a GPU (the peer's imported by CUDA
IPC) or shared host memory (pinned here at first use).

* A handle is opened with the index of *our* device, not of the owner's: torch then takes
  the memory for local, and the copy goes over NVLink. Opened with the owner's index, it
  is staged through the host at a tenth of the rate (369 against 38 GB/s, two H200).
* The owner must outlive its importers, and does: a peer that ended is dropped.
* Whoever calls has seen to it that the bytes are there: work on other streams that
  writes the source has ended.
* The event loop plans, fills the row table and launches; a thread waits for the end (`launcher.py`).

The peer's grant is held on its board for the length of the copy, as over shared memory.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from base.errors import StaleError, TransferFailedError
from base.grants import Grant, PeerDescriptor
from transfer.batch import Pieces, Priority
from transfer.completion import Completion
from transfer.gpu import copy_engine
from transfer.gpu.kernels.copy_ranges import compiled, launch
from transfer.gpu.launcher import Launcher, cannot_be_cancelled
from transfer.owned import segment as segments
from transfer.owned.device_access import CopyStream
from transfer.owned.ranges import Offsets
from transfer.owned.segment import DeviceMemory, Segment
from transfer.shm.mapped import MappedPeer, MappedPeers
from transfer.transport import OfferedTransport, Transport

_CUDA_HOST_REGISTER_MAPPED = 2
_ALREADY_REGISTERED = 712
_NOTHING = contextlib.nullcontext()

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
    encoded = {"parts": coded, "skipped_bytes": skipped_bytes, "address": tensor.data_ptr()}
    handle = json.dumps(encoded).encode()
    num_bytes = tensor.numel() * tensor.element_size()
    device: int = tensor.device.index
    return DeviceMemory(tensor.data_ptr(), num_bytes, device, handle, CudaAccess(device))


def offer(host: object) -> OfferedTransport:
    """Return the transport."""
    return OfferedTransport(CudaTransport())


class CudaTransport(Transport):
    """Owns imported memory, pinned mappings and the threads that wait. The event loop launches."""

    name = "cuda_ipc"

    def __init__(self, make_stream: Callable[[int], CopyStream] | None = None) -> None:
        """`make_stream`: of a device's index; whoever has no GPU hands in another."""
        self._make_stream = make_stream or CudaStream
        self._peers = MappedPeers()
        self._reach = _Reach()
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="cuda-open")
        self._launchers: dict[int, Launcher] = {}

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
        with self._peers.copying(peer) as mapped:
            with mapped.board.held(grant):
                await self._copy(mapped, grant, pieces, priority)
            if mapped.is_dead():
                raise TransferFailedError("the peer's process ended during the copy")

    async def close(self) -> None:
        await asyncio.to_thread(self._opener.shutdown)
        for launcher in self._launchers.values():
            launcher.close()
        self._reach.close()
        self._peers.close()

    async def _copy(self, mapped: MappedPeer, grant: Grant, pieces: Pieces, priority: Priority) -> None:
        device = pieces.segment.device
        device = torch.cuda.current_device() if device is None else device
        reached = self._reach.known_or_none(mapped, grant.segment_id, pieces.segment, device)
        if reached is None:
            reached = await self._open(mapped, grant.segment_id, pieces.segment, device)
        if pieces.peer_end > reached.num_bytes:
            raise StaleError("the peer's segment has another size")
        by_engine = reached.is_host or pieces.segment.device is None
        launcher = self._launchers[device]
        try:
            await launcher.copy(grant.operation, pieces, reached.address, by_engine, priority)
        except RuntimeError as error:
            raise TransferFailedError(f"the GPU gave up: {error}") from error

    async def _open(self, mapped: MappedPeer, segment_id: int, ours: Segment, device: int) -> _Imported:
        """Return the peer's memory. Compiling and pinning take seconds, which must not stop the loop."""
        make_stream = functools.partial(self._make_stream, device)
        make_launcher = functools.partial(Launcher, make_stream, asyncio.get_running_loop())

        def opened() -> _Imported:
            if device not in self._launchers:
                self._launchers[device] = make_launcher()
            return self._reach.opened(mapped, segment_id, ours, device)

        return await _result(self._opener.submit(opened))


async def _result(running: Future[T]) -> T:
    """Return or raise what a thread does, and never before it is done."""
    completion = Completion()
    running.add_done_callback(lambda done: completion.end(done.exception()))
    try:
        await completion.wait(cannot_be_cancelled)
        return running.result()
    finally:
        del running  # it holds the error, whose traceback holds this frame


class _Entered(threading.local):
    """GPUs that this thread has a context of."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_entered = _Entered()


class CudaStream:
    """A stream of one GPU, its table on both sides, and the kernel."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._handle: int = self._stream.cuda_stream
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.wait = self._event.synchronize
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._kernel = compiled(torch.zeros(3, dtype=torch.int64, device=device))
            self._stream.synchronize()

    def make_cells(self, count: int) -> Offsets:
        self._staged = torch.empty(count, dtype=torch.int64, pin_memory=True)
        self._table = torch.empty(count, dtype=torch.int64, device=self._device)
        self._addresses = self._table.data_ptr(), self._staged.data_ptr()
        cells: Offsets = self._staged.numpy()
        return cells

    def start(self, num_rows: int, max_bytes: int, by_engine: bool) -> None:
        # Entering a device takes 3 us, and mostly the thread is there.
        is_here = torch.cuda.current_device() == self._device
        with _NOTHING if is_here else torch.cuda.device(self._device):
            if self._device not in _entered.devices:
                # The driver's own calls need a context on their thread; the runtime's make one.
                torch.cuda.current_stream().query()
                _entered.devices.add(self._device)
            self._queue(num_rows, max_bytes, by_engine)

    def _queue(self, num_rows: int, max_bytes: int, by_engine: bool) -> None:
        there, here = self._addresses
        if by_engine:
            sources, sizes, targets = here, here + 8 * num_rows, here + 16 * num_rows
            copy_engine.copy(sources, targets, sizes, num_rows, self._handle)
        else:
            # Left in pinned memory it makes 16 KiB rows come to 336 GB/s instead of 362.
            copy_engine.to_device(there, here, 24 * num_rows, self._handle)
            launch(self._kernel, self._table, num_rows, max_bytes, self._handle)
        self._event.record(self._stream)


class CudaAccess:
    """A GPU of this process."""

    def __init__(self, device: int) -> None:
        self._device = device

    def make_stream(self) -> CudaStream:
        return CudaStream(self._device)

    def pinned(self, num_bytes: int) -> memoryview:
        memory: memoryview = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
        return memory


class _Reach:
    """Memory of peers and of our own that this process's GPUs can address.

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


@dataclass(frozen=True, slots=True, eq=False)
class _Imported:
    """Memory of a peer as an address of ours; keeps what must live as long."""

    owner: MappedPeer
    address: int
    num_bytes: int
    kept: torch.UntypedStorage | memoryview | None

    @property
    def is_host(self) -> bool:
        return isinstance(self.kept, memoryview)


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
