"""The cuda_ipc transport: memory of GPUs of one host, and their hosts' shared memory.

A batch is one launch of `transfer/kernels/copy_ranges.py` on our GPU, straight from our
blocks to the peer's, with nothing staged. Four cases are one: each side is memory of a
GPU (the peer's imported by CUDA IPC) or shared host memory (pinned here at first use).

* A handle is opened with the index of *our* device, not of the owner's: torch then takes
  the memory for local, and the copy goes over NVLink. Opened with the owner's index, it
  is staged through the host at a tenth of the rate (369 against 38 GB/s, two H200).
* The owner must outlive its importers, and does: a peer that ended is dropped.
* Whoever calls has seen to it that the bytes are there: work on other streams that
  writes the source has ended.

The peer's grant is held on its board for the length of the copy, as over shared memory.
"""

from __future__ import annotations

import array
import base64
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from base.errors import ProtocolError, StaleError, TransferFailedError
from base.grants import Grant, Operation, PeerDescriptor
from transfer import segment as segments
from transfer.batch import Piece, Priority, split_pieces
from transfer.completion import Completion
from transfer.kernels.copy_ranges import ALIGNMENT, WORD_BYTES, copy_ranges
from transfer.mapped import MappedPeer, MappedPeers
from transfer.segment import DeviceMemory

ROW_BYTES = 1 << 20
"""Longest range of one row: a longer one is cut, or its tiles outnumber everything else's."""
NUM_LAUNCHERS = 4
"""While one batch is copied, the next are prepared: 64 MiB take 0.2 ms on NVLink, its table
of rows as long again in Python."""
_CUDA_HOST_REGISTER_MAPPED = 2
_ALREADY_REGISTERED = 712


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
    handle = json.dumps({"parts": coded, "skipped_bytes": skipped_bytes}).encode()
    num_bytes = tensor.numel() * tensor.element_size()
    return DeviceMemory(tensor.data_ptr(), num_bytes, tensor.device.index, handle)


class CudaTransport:
    """Owns imported memory, pinned mappings and the threads that launch and wait."""

    name = "cuda_ipc"

    def __init__(self) -> None:
        self._peers = MappedPeers()
        self._launchers = ThreadPoolExecutor(NUM_LAUNCHERS, thread_name_prefix="cuda-copy")
        self._reach = _Reach()

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

    async def move(
        self, peer: PeerDescriptor, grant: Grant, pieces: Sequence[Piece], priority: Priority
    ) -> None:
        mapped = self._peers.mapped(peer)
        completion = Completion()
        mapped.num_copies += 1
        try:
            running = self._launchers.submit(self._copy, mapped, grant, pieces)
            running.add_done_callback(lambda done: completion.end(done.exception()))
            # A launch cannot be taken back; it ends within milliseconds.
            await completion.wait(lambda: None)
        finally:
            mapped.num_copies -= 1

    async def close(self) -> None:
        self._launchers.shutdown()
        self._reach.close()
        self._peers.close()

    def _copy(self, mapped: MappedPeer, grant: Grant, pieces: Sequence[Piece]) -> None:
        with mapped.board.held(grant):
            device = pieces[0].segment.device
            device = torch.cuda.current_device() if device is None else device
            peer_address = self._reach.peer_address(mapped, grant.segment_id, device)
            if any(piece.peer_offset + piece.length > peer_address.num_bytes for piece in pieces):
                raise StaleError("the peer's segment has another size")
            for piece in pieces:
                self._reach.pin_ours(piece)
            try:
                run_copy(grant.operation, pieces, peer_address.address, device)
            except RuntimeError as error:
                raise TransferFailedError(f"the GPU gave up: {error}") from error
        if mapped.is_dead():
            raise TransferFailedError("the peer's process ended during the copy")


def run_copy(operation: Operation, pieces: Sequence[Piece], peer_base: int, device: int) -> None:
    """Copy on `device` and wait for the end. Raises ProtocolError for what is not aligned."""
    rows = array.array("q")
    longest = 0
    for (part,) in split_pieces(pieces, ROW_BYTES, 1):
        ours, theirs = part.address, peer_base + part.peer_offset
        if (ours | theirs | part.length) % ALIGNMENT:
            raise ProtocolError(f"GPU copies are of multiples of {ALIGNMENT} bytes")
        source, target = (ours, theirs) if operation is Operation.WRITE else (theirs, ours)
        rows.extend((source, target, part.length // WORD_BYTES))
        longest = max(longest, part.length)
    stream = _stream_of(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        table = torch.frombuffer(rows, dtype=torch.int64).view(-1, 3).pin_memory()
        copy_ranges(table.to(device, non_blocking=True), longest // WORD_BYTES)
        # Waits for the device on this thread alone, without the interpreter.
        stream.synchronize()


class _Reach:
    """What of the peers' memory and of our own this process's GPUs can address. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._imported: dict[tuple[int, int, int], _Imported] = {}
        self._pinned: dict[int, int] = {}

    def peer_address(self, mapped: MappedPeer, segment_id: int, device: int) -> _Imported:
        key = (mapped.epoch, segment_id, device)
        with self._lock:
            known = self._imported.get(key)
            if known is None:
                self._drop_dead()
                known = self._imported[key] = self._open(mapped, segment_id, device)
            return known

    def pin_ours(self, piece: Piece) -> None:
        """Make a host segment of ours readable by the GPU, once."""
        segment = piece.segment
        if segment.device is None:
            with self._lock:
                if segment.address not in self._pinned:
                    self._pin(segment.address, segment.num_bytes)

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
        self, owner: MappedPeer, address: int, num_bytes: int, kept: torch.UntypedStorage | memoryview
    ) -> None:
        self.owner = owner
        self.address = address
        self.num_bytes = num_bytes
        self._kept = kept


def _import(mapped: MappedPeer, segment_id: int, device: int) -> _Imported:
    coded = json.loads(mapped.board.handle_of(segment_id))
    parts = [base64.b64decode(part["bytes"]) if isinstance(part, dict) else part for part in coded["parts"]]
    try:
        storage = torch.UntypedStorage._new_shared_cuda(device, *parts[1:])
    except RuntimeError as error:
        raise TransferFailedError(f"the peer's GPU memory cannot be imported: {error}") from error
    address = storage.data_ptr() + coded["skipped_bytes"]
    return _Imported(mapped, address, mapped.board.num_bytes_of(segment_id), storage)


def _stream_of(device: int) -> torch.cuda.Stream:
    # From torch's pool of 32 a device: costs nothing to ask for again.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
