"""Verbs: NICs, registered memory and reliable connected queue pairs, through pyverbs.

The only file that knows pyverbs, an optional package: without it, without a NIC, or
where the kernel refuses, `open_rails` returns the reason in one line and nothing else of
the program changes. What the bindings demand of their user:

* They never let go of the interpreter, so nothing here waits: completions come through
  the channel's descriptor, watched by the event loop.
* Version 44 does not give that descriptor; it is the one that appears in /proc/self/fd.
* retry_cnt 7 means "for ever" to the software NIC: 6 is the most that ends.
* A memory region keeps no reference to its memory; the segment does.
* A region of a DMA-BUF (a GPU's memory, `dma_buf.py`) is addressed by offsets in the DMA-BUF: the
  bindings, unlike the library, take no other address for it.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path
from typing import NamedTuple

from base.errors import TransferFailedError
from transfer.owned.segment import Segment
from transfer.rdma import dma_buf
from transfer.rdma.dma_buf import CudaDriver
from transfer.rdma.topology import nic_place

try:
    import pyverbs.enums as verbs
    from pyverbs.addr import GID, AHAttr, GlobalRoute
    from pyverbs.cq import CQ, CompChannel
    from pyverbs.device import Context, get_device_list
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError
    from pyverbs.qp import QPAttr, QPCap, QPEx, QPInitAttrEx
    from pyverbs.wr import SGE

    MISSING = ""
    try:
        from pyverbs.mr import DmaBufMR

        NO_DMA_BUF = ""
    except ImportError:
        NO_DMA_BUF = "this pyverbs cannot register a DMA-BUF"
except ImportError as error:
    NO_DMA_BUF = "no pyverbs"
    MISSING = f"no pyverbs ({error}): install the system's python3-pyverbs of the same release as libibverbs"

MAX_OUTSTANDING = 128
"""Work requests on one queue pair."""
SIGNAL_EVERY = 8
"""Work requests for which there is one completion; they end in order."""
MAX_RAILS = 8
_PORT = 1
_CQ_ENTRIES = 4096
_MAX_READS = 16
_TIMEOUT = 14
"""4.096 us * 2^14 = 67 ms until a packet is sent again."""
_RETRIES = 6
_SUCCESS = 0
"""IBV_WC_SUCCESS, without looking it up for each."""
_END = struct.Struct("<IIHB16s")
END_BYTES = _END.size


@dataclass(frozen=True, slots=True)
class QueuePairEnd:
    """Description of a queue pair that the other side needs to connect to it."""

    number: int
    psn: int
    lid: int
    mtu: int
    gid: bytes

    def pack(self) -> bytes:
        return _END.pack(self.number, self.psn, self.lid, self.mtu, self.gid)


def unpack_ends(data: bytes) -> list[QueuePairEnd]:
    """Return one end for each rail; raises TransferFailedError if the data is no such list."""
    if not data or len(data) % END_BYTES or len(data) > MAX_RAILS * END_BYTES:
        raise TransferFailedError(f"{len(data)} bytes are no list of queue pairs")
    return [QueuePairEnd(*fields) for fields in _END.iter_unpack(data)]


class Ended(NamedTuple):
    """One completion: all work of a queue pair up to `work_id` has ended. A tuple: sooner made."""

    queue_pair: int
    work_id: int
    error: str
    """Reason of a failure; empty: it went well."""
    is_refused: bool
    """The peer's NIC refused the access: another rail would be refused as well."""


def address_of(segment: Segment) -> int:
    """Return the address of a segment's first byte in work requests, here and at peers."""
    return segment.address if segment.device is None else dma_buf.offset_of(segment.address)


def open_rails(driver: CudaDriver | None = None) -> tuple[list[Rail], str]:
    """Return the usable NICs of this host, or none and the reason in one line.

    `driver`: exports memory of GPUs; None: such memory is not registered.
    """
    if MISSING:
        return [], MISSING
    try:
        names = [device.name.decode() for device in get_device_list()]
    except PyverbsError as error:
        return [], f"the RDMA devices cannot be listed: {error}"
    rails: list[Rail] = []
    reasons = []
    for name in names[:MAX_RAILS]:
        try:
            rails.append(Rail(name, driver))
        except (PyverbsError, OSError, TransferFailedError) as error:
            reasons.append(f"{name}: {error}")
    return rails, "; ".join(reasons) or ("" if rails else "this host has no RDMA device")


def registered(rail: str, domain: PD, segment: Segment, driver: CudaDriver | None) -> MR:
    """Return a segment's memory region in the protection domain of a rail; raises TransferFailedError."""
    access = verbs.IBV_ACCESS_LOCAL_WRITE | verbs.IBV_ACCESS_REMOTE_WRITE | verbs.IBV_ACCESS_REMOTE_READ
    device, num_bytes = segment.device, segment.num_bytes
    if device is None:
        try:
            return MR(domain, num_bytes, access, address=segment.address)
        except PyverbsError as error:
            raise TransferFailedError(
                f"{rail}: {num_bytes} bytes cannot be registered ({error}); see ulimit -l"
            ) from error
    if driver is None:
        raise TransferFailedError(f"{rail}: memory of GPUs is not registered here")
    try:
        with driver.exported(device, segment.address, num_bytes) as fd:
            return DmaBufMR(domain, num_bytes, access, fd, dma_buf.offset_of(segment.address))
    except (PyverbsError, OSError, RuntimeError) as error:
        raise TransferFailedError(
            f"{rail}: {num_bytes} bytes of GPU {device} cannot be registered by DMA-BUF ({error})"
        ) from error


class Rail:
    """One NIC: its memory regions and its completion queue. `poll` and `drain` are the event loop's."""

    def __init__(self, name: str, driver: CudaDriver | None = None) -> None:
        self.name = name
        self._driver = driver
        self.place = nic_place(name)
        self._context = Context(name=name)
        port = self._context.query_port(_PORT)
        if port.state != verbs.IBV_PORT_ACTIVE:
            raise TransferFailedError("its port is not active")
        self.mtu = int(port.active_mtu)
        self.lid = int(port.lid)
        self.gid_index = _gid_index(name)
        self.gid = IPv6Address(str(self._context.query_gid(_PORT, self.gid_index))).packed
        self._domain = PD(self._context)
        descriptors = _descriptors()
        self._channel = CompChannel(self._context)
        (self.channel_fd,) = _descriptors() - descriptors
        os.set_blocking(self.channel_fd, False)
        self._queue = CQ(self._context, _CQ_ENTRIES, None, self._channel, 0)
        self._queue.req_notify()
        self._is_armed = True
        self._regions: dict[int, MR] = {}
        # Owner's and asker's side register from different threads.
        self._lock = threading.Lock()

    def keys(self, segment: Segment) -> tuple[int, int]:
        """Return (local, remote) key of a segment, registered at its first use.

        Raises:
            TransferFailedError: the NIC or the limit of locked memory refuses; or a GPU's driver.
        """
        with self._lock:
            region = self._regions.get(segment.segment_id)
            if region is None:
                region = self._regions[segment.segment_id] = registered(
                    self.name, self._domain, segment, self._driver
                )
            return region.lkey, region.rkey

    def queue_pair(self) -> QueuePair:
        """Return a queue pair that is not connected yet; raises TransferFailedError."""
        try:
            return QueuePair(self, self._context, self._domain, self._queue)
        except PyverbsError as error:
            raise TransferFailedError(f"{self.name}: no queue pair: {error}") from error

    def arm(self) -> bool:
        """Make the descriptor readable at the next end, once; return whether that is new. Then `drain`.

        What has ended before causes no event. Nobody who looks needs one, and each costs a call
        of the kernel and a turn of the loop.
        """
        is_new = not self._is_armed
        if is_new:
            self._queue.req_notify()
            self._is_armed = True
        return is_new

    def poll(self) -> list[Ended]:
        """Take the event of the descriptor, and `drain`. No other event comes until `arm`."""
        try:
            self._channel.get_cq_event(self._queue)
            self._queue.ack_events(1)
            self._is_armed = False
        except PyverbsRDMAError:
            # Woken for an event that an earlier poll had taken already.
            return self.drain()
        return self.drain()

    def drain(self) -> list[Ended]:
        """Return what has ended since the last call, with nobody woken: no call of the kernel's."""
        ended: list[Ended] = []
        while True:
            count, completions = self._queue.poll(64)
            for each in completions:
                status = each.status
                if status == _SUCCESS:
                    ended.append(Ended(each.qp_num, each.wr_id, "", False))
                else:
                    is_refused = status == verbs.IBV_WC_REM_ACCESS_ERR
                    ended.append(Ended(each.qp_num, each.wr_id, f"status {status}", is_refused))
            if count < 64:
                return ended

    def close(self) -> None:
        """Give everything back; queue pairs must be closed before."""
        for region in self._regions.values():
            region.close()
        for owned in (self._queue, self._channel, self._domain, self._context):
            owned.close()


class QueuePair:
    """One connection over one rail: one-sided writes and reads."""

    def __init__(self, rail: Rail, context: Context, domain: PD, queue: CQ) -> None:
        self.rail = rail
        cap = QPCap(max_send_wr=MAX_OUTSTANDING + 1, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        self._pair = QPEx(
            context,
            QPInitAttrEx(
                qp_type=verbs.IBV_QPT_RC,
                scq=queue,
                rcq=queue,
                cap=cap,
                pd=domain,
                comp_mask=verbs.IBV_QP_INIT_ATTR_PD | verbs.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                send_ops_flags=verbs.IBV_QP_EX_WITH_RDMA_WRITE | verbs.IBV_QP_EX_WITH_RDMA_READ,
            ),
        )
        self._psn = secrets.randbits(24)
        # Objects of the bindings cost more than what is done with them: one is enough,
        # posting copies it.
        self._range = SGE(0, 0, 0)

    @property
    def end(self) -> QueuePairEnd:
        return QueuePairEnd(self._pair.qp_num, self._psn, self.rail.lid, self.rail.mtu, self.rail.gid)

    def connect(self, peer: QueuePairEnd) -> None:
        """Be ready for the peer's accesses and for our own; raises TransferFailedError."""
        try:
            self._connect(peer)
        except PyverbsError as error:
            raise TransferFailedError(f"{self.rail.name}: cannot connect: {error}") from error

    def post(self, work: Sequence[tuple[int, bool, int, int, int, int, int]], is_write: bool) -> None:
        """Begin one-sided accesses: (id, signalled, address, length, local key, peer address, peer key)."""
        pair, span = self._pair, self._range
        access = pair.wr_rdma_write if is_write else pair.wr_rdma_read
        try:
            pair.wr_start()
            for work_id, is_signalled, address, length, local_key, peer_address, peer_key in work:
                pair.wr_id = work_id
                pair.wr_flags = verbs.IBV_SEND_SIGNALED if is_signalled else 0
                access(peer_key, peer_address)
                span.addr, span.length, span.lkey = address, length, local_key
                pair.wr_set_sge(span)
            pair.wr_complete()
        except PyverbsError as error:
            raise TransferFailedError(f"{self.rail.name}: {error}") from error

    def close(self) -> None:
        """Destroy it: when this returns, the NIC touches no memory through it."""
        self._pair.close()

    def _connect(self, peer: QueuePairEnd) -> None:
        attributes = QPAttr(port_num=_PORT)
        attributes.pkey_index = 0
        attributes.qp_access_flags = verbs.IBV_ACCESS_REMOTE_WRITE | verbs.IBV_ACCESS_REMOTE_READ
        self._pair.to_init(attributes)
        route = GlobalRoute(dgid=GID(IPv6Address(peer.gid).exploded), sgid_index=self.rail.gid_index)
        attributes = QPAttr(port_num=_PORT)
        attributes.path_mtu = min(self.rail.mtu, peer.mtu)
        attributes.dest_qp_num = peer.number
        attributes.rq_psn = peer.psn
        attributes.max_dest_rd_atomic = _MAX_READS
        attributes.min_rnr_timer = 12
        attributes.ah_attr = AHAttr(port_num=_PORT, is_global=1, dlid=peer.lid, gr=route)
        self._pair.to_rtr(attributes)
        attributes = QPAttr(port_num=_PORT)
        attributes.sq_psn = self._psn
        attributes.timeout = _TIMEOUT
        attributes.retry_cnt = _RETRIES
        attributes.rnr_retry = _RETRIES
        attributes.max_rd_atomic = _MAX_READS
        self._pair.to_rts(attributes)


def _descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[infinibandevent]":
                found.add(int(name))
        except OSError:
            # The descriptor of the listing itself.
            continue
    return found


def _gid_index(name: str) -> int:
    """Return the index of the port's RoCE v2 address in IPv4 form; 0 where there is none."""
    port = Path(f"/sys/class/infiniband/{name}/ports/{_PORT}")
    for entry in sorted((port / "gid_attrs/types").glob("*"), key=lambda path: int(path.name)):
        try:
            is_v2 = entry.read_text().strip() == "RoCE v2"
        except OSError:
            continue
        gid = (port / "gids" / entry.name).read_text().strip()
        if is_v2 and gid.startswith("0000:0000:0000:0000:0000:ffff:"):
            return int(entry.name)
    return 0
