"""A GPU's memory as a DMA-BUF: what the driver and the bindings are asked, and what follows a refusal."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from base.config import TransferConfig
from base.errors import TransferFailedError
from base.grants import Endpoint, Operation, PeerDescriptor
from tests.manual_clock import ManualClock
from tests.transfer.gpu.fake_device import device_memory
from tests.transfer.rdma.made_up_rails import NOWHERE, FakeRail
from transfer.agent import TransferAgent
from transfer.batch import Pieces, Priority
from transfer.gpu.staging import PinnedStaging
from transfer.owned import segment as segments
from transfer.owned.holdings import Holdings
from transfer.owned.segment import Segment
from transfer.rdma import verbs as rdma
from transfer.rdma.dma_buf import PAGE_BYTES, CudaDriver, offset_of
from transfer.rdma.registrations import Registrations, device_refusal_or_none, memory_place
from transfer.rdma.topology import SYSFS, gpu_place
from transfer.rdma.transport import RdmaTarget, RdmaTransport
from transfer.tcp.frame import MAX_FRAME_BYTES
from transfer.tcp.greeting import PeerKey
from transfer.tcp.reactor import Reactor
from transfer.tcp.server import TcpServer

DMA_BUF_SUPPORTED, WRITES_ORDERING = 124, 118
ADDRESS = 0x7F00_0000_0000 + 3 * PAGE_BYTES + 512
EPOCH = 7


class FakeCuda:
    """The driver's library, of a host with one GPU whose memory is a memfd. Arguments come as for C."""

    def __init__(self) -> None:
        self.attributes = {DMA_BUF_SUPPORTED: 1, WRITES_ORDERING: 100}
        self.exports = 0
        self.exported: list[tuple[int, int]] = []
        self.contexts: list[str] = []
        """Retained and pushed, in order."""
        self.functions = {
            "cuInit": self.initialize,
            "cuDeviceGet": self.device_of,
            "cuDeviceGetAttribute": self.attribute_of,
            "cuDeviceGetPCIBusId": self.bus_id_of,
            "cuDevicePrimaryCtxRetain": self.retain,
            "cuCtxPushCurrent_v2": self.push,
            "cuCtxPopCurrent_v2": self.pop,
            "cuDevicePrimaryCtxRelease_v2": self.release,
            "cuMemGetHandleForAddressRange": self.export,
        }

    def __getattr__(self, name):
        try:
            return self.functions[name]
        except KeyError:
            raise AttributeError(name) from None

    def initialize(self, flags):
        return 0

    def device_of(self, handle, device):
        handle._obj.value = device
        return 0 if device == 0 else 101

    def attribute_of(self, value, number, handle):
        value._obj.value = self.attributes[number]
        return 0

    def bus_id_of(self, name, size, handle):
        name.value = b"0000:1A:00.0"
        return 0

    def retain(self, context, handle):
        self.contexts.append("retained")
        return 0

    def push(self, context):
        self.contexts.append("pushed")
        return 0

    def pop(self, context):
        assert self.contexts.pop() == "pushed"
        return 0

    def release(self, handle):
        assert self.contexts.pop() == "retained"
        return 0

    def export(self, fd, begin, size, kind, flags):
        assert (self.contexts, kind, flags.value) == (["retained", "pushed"], 1, 0)
        self.exported.append((begin.value, size.value))
        fd._obj.value = os.memfd_create("dma-buf")
        return self.exports


def old() -> FakeCuda:
    cuda = FakeCuda()
    del cuda.functions["cuMemGetHandleForAddressRange"]
    return cuda


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def driver(cuda: FakeCuda) -> CudaDriver:
    return CudaDriver(lambda: cuda)


def absent() -> None:
    raise OSError("libcuda.so.1: cannot open")


def of_gpu(address: int = ADDRESS, num_bytes: int = 4096, segment_id: int = 1) -> Segment:
    return Segment(segment_id, memoryview(b""), address, None, num_bytes, 0)


@pytest.mark.parametrize(
    ("begins", "num_bytes", "pages"),
    [(0, PAGE_BYTES, 1), (0, 1, 1), (512, PAGE_BYTES, 2), (PAGE_BYTES - 1, 2, 2), (512, PAGE_BYTES - 512, 1)],
)
def test_whole_pages_are_exported_and_the_context_is_given_back(
    cuda: FakeCuda, driver: CudaDriver, begins: int, num_bytes: int, pages: int
) -> None:
    with driver.exported(0, (9 << 20) + begins, num_bytes):
        assert cuda.contexts == []
    assert cuda.exported == [(9 << 20, pages * PAGE_BYTES)]
    assert offset_of((9 << 20) + begins) == begins


def test_memory_that_the_driver_does_not_export_gives_the_context_back_and_says_the_code(
    cuda: FakeCuda, driver: CudaDriver
) -> None:
    cuda.exports = 801
    with (
        pytest.raises(RuntimeError, match="cuMemGetHandleForAddressRange: CUDA error 801"),
        driver.exported(0, ADDRESS, 64),
    ):
        pass
    assert cuda.contexts == []


def test_a_gpu_that_exports_is_not_refused_and_its_bus_is_known(driver: CudaDriver) -> None:
    assert driver.refusal_or_none(0) is None
    assert driver.bus_id_or_none(0) == "0000:1A:00.0"


@pytest.mark.parametrize(
    ("library", "attributes", "device", "told"),
    [
        (absent, {}, 0, "libcuda.so.1"),
        (old, {}, 0, "11.7 or later"),
        (FakeCuda, {DMA_BUF_SUPPORTED: 0}, 0, "GPU 0 exports no DMA-BUF"),
        (FakeCuda, {WRITES_ORDERING: 0}, 0, "GPU 0 does not order"),
        (FakeCuda, {}, 1, "cuDeviceGet: CUDA error 101"),
    ],
)
def test_why_a_gpu_is_refused_is_told_in_a_line(library, attributes, device: int, told: str) -> None:
    def load():
        loaded = library()
        loaded.attributes |= attributes
        return loaded

    driver = CudaDriver(load)
    assert told in (driver.refusal_or_none(device) or "")
    assert (driver.bus_id_or_none(device) is None) == (library is absent or device == 1)


def test_the_descriptor_is_open_for_whoever_registers_and_closed_whatever_becomes_of_that(
    driver: CudaDriver,
) -> None:
    with suppress(RuntimeError), driver.exported(0, ADDRESS, 64) as fd:
        os.fstat(fd)
        raise RuntimeError("refused")
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


class FakeBindingsError(Exception):
    pass


class FakeRegion:
    """What the bindings make of a DMA-BUF."""

    refuses = False

    def __init__(self, domain, length, access, dmabuf, offset):
        os.fstat(dmabuf)
        if self.refuses:
            raise FakeBindingsError("Operation not supported")
        self.made_of = (domain, length, access, offset)


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> type[FakeRegion]:
    flags = SimpleNamespace(IBV_ACCESS_LOCAL_WRITE=1, IBV_ACCESS_REMOTE_WRITE=2, IBV_ACCESS_REMOTE_READ=4)
    for name, value in {"verbs": flags, "DmaBufMR": FakeRegion, "PyverbsError": FakeBindingsError}.items():
        monkeypatch.setattr(rdma, name, value, raising=False)
    monkeypatch.setattr(FakeRegion, "refuses", False)
    return FakeRegion


def test_the_bindings_register_a_gpus_memory_at_its_offset(bindings, driver: CudaDriver) -> None:
    segment = of_gpu()
    region = rdma.registered("mlx5_0", "domain", segment, driver)
    assert region.made_of == ("domain", 4096, 7, 512)
    # The bindings have a region of a DMA-BUF begin at its offset, not at the memory's address.
    assert rdma.address_of(segment) == 512


def test_host_memory_is_addressed_where_it_lies() -> None:
    segment = segments.over(1, bytearray(16))
    assert rdma.address_of(segment) == segment.address


@pytest.mark.parametrize("who", ["NIC", "GPU", "nobody exports"])
def test_whoever_refuses_a_gpus_memory_is_told(
    bindings, cuda: FakeCuda, driver: CudaDriver, who: str
) -> None:
    bindings.refuses = who == "NIC"
    cuda.exports = 801 if who == "GPU" else 0
    told = {"NIC": "Operation not supported", "GPU": "CUDA error 801", "nobody exports": "not registered"}
    with pytest.raises(TransferFailedError, match=f"mlx5_0: .*{told[who]}"):
        rdma.registered("mlx5_0", "domain", of_gpu(), None if who == "nobody exports" else driver)


def test_without_bindings_or_a_driver_the_refusal_says_which(
    monkeypatch: pytest.MonkeyPatch, driver: CudaDriver
) -> None:
    monkeypatch.setattr("transfer.rdma.registrations.NO_DMA_BUF", "no such class")
    assert device_refusal_or_none(driver, 0) == "no such class"
    monkeypatch.setattr("transfer.rdma.registrations.NO_DMA_BUF", "")
    assert device_refusal_or_none(driver, 0) is None
    assert device_refusal_or_none(CudaDriver(absent), 0) == "libcuda.so.1: cannot open"


def test_a_gpu_that_the_driver_does_not_place_is_nowhere(driver: CudaDriver) -> None:
    assert memory_place(CudaDriver(absent), 0) == NOWHERE
    assert memory_place(driver, 0).path == ()


class DeviceRail(FakeRail):
    """Registers memory of the host; that of a GPU if it is told so."""

    def __init__(self, name: str, refuses: bool) -> None:
        super().__init__(name)
        self.refuses = refuses
        self.asked = 0

    def keys(self, segment: Segment) -> tuple[int, int]:
        self.asked += segment.device is not None
        if self.refuses and segment.device is not None:
            raise TransferFailedError(f"{self.name}: not by DMA-BUF")
        return 1, 2


def test_a_gpus_memory_is_addressed_by_offsets_on_the_rails_that_take_it() -> None:
    registrations = Registrations([DeviceRail("a", True), DeviceRail("b", False)], lambda device: NOWHERE)
    reach = registrations.remote(of_gpu())
    assert (reach.address, reach.keys, reach.distances) == (512, (0, 2), (255, 4))
    assert registrations.refusal_or_none(0) is None


def test_what_every_rail_refused_is_not_tried_again_until_another_segment_goes() -> None:
    rail = DeviceRail("a", True)
    registrations = Registrations([rail], lambda device: NOWHERE)
    for _ in range(2):
        with pytest.raises(TransferFailedError, match="a: not by DMA-BUF"):
            registrations.local(of_gpu())
    assert (rail.asked, registrations.refusal_or_none(0)) == (1, "a: not by DMA-BUF")
    assert registrations.refusal_or_none(None) is registrations.refusal_or_none(1) is None
    rail.refuses = False
    registrations.local(of_gpu(segment_id=2))
    assert registrations.refusal_or_none(0) is None


def test_no_rail_is_asked_about_a_gpu_that_exports_nothing() -> None:
    rail = DeviceRail("a", False)
    registrations = Registrations([rail], lambda device: NOWHERE, lambda device: "exports nothing")
    with pytest.raises(TransferFailedError, match="exports nothing"):
        registrations.local(of_gpu())
    assert (rail.asked, registrations.refusal_or_none(0)) == (0, "exports nothing")


class Owner:
    """A process with one GPU segment, and one rail to it."""

    def __init__(self, reactor: Reactor, clock: ManualClock) -> None:
        self.rail = DeviceRail("theirs", refuses=True)
        stage = partial(PinnedStaging, buffer_bytes=MAX_FRAME_BYTES)
        self.holdings = Holdings(clock, None, stage=stage)
        self.registrations = Registrations([self.rail], lambda device: NOWHERE)
        target = RdmaTarget(self.registrations, self.holdings)
        self.server = TcpServer("127.0.0.1", 0, PeerKey(b"", EPOCH), self.holdings, [reactor], target)
        self.memory = bytearray(64)
        self.segment = self.holdings.register_device(device_memory(self.memory), is_served=True)
        self.peer = PeerDescriptor("peer", EPOCH, (Endpoint("rdma", self.server.address),))


@pytest.fixture
async def owner() -> AsyncIterator[Owner]:
    reactor = Reactor("test")
    started = Owner(reactor, ManualClock())
    yield started
    started.server.close()
    reactor.stop()
    started.holdings.close()
    os.close(started.rail.channel_fd)


async def test_a_segment_that_the_owner_cannot_register_fails_the_batch_once_and_is_refused_then(
    owner: Owner,
) -> None:
    rail = DeviceRail("ours", refuses=False)
    ours = segments.over(1, bytearray(16))
    transport = RdmaTransport(Registrations([rail], lambda device: NOWHERE), ManualClock())
    grant = owner.holdings.grant(owner.segment, [0], 64, Operation.WRITE, 10.0)
    segment_id = owner.segment.segment_id
    assert transport.refusal_or_none(owner.peer, segment_id, None) is None
    pieces = Pieces(ours, np.array([[0], [16], [0]]))
    with pytest.raises(TransferFailedError, match="theirs: not by DMA-BUF"):
        await transport.move(owner.peer, grant, pieces, Priority.FOREGROUND)
    told = "the peer's memory: theirs: not by DMA-BUF"
    assert transport.refusal_or_none(owner.peer, segment_id, None) == told
    assert transport.refusal_or_none(owner.peer, segment_id + 1, None) is None
    restarted = PeerDescriptor("peer", EPOCH + 1, owner.peer.endpoints)
    assert transport.refusal_or_none(restarted, segment_id, None) is None
    await transport.close()
    os.close(rail.channel_fd)


async def test_a_connection_that_ends_is_no_refusal_of_the_segment(owner: Owner) -> None:
    rail = DeviceRail("ours", refuses=False)
    transport = RdmaTransport(Registrations([rail], lambda device: NOWHERE), ManualClock())
    grant = owner.holdings.grant(owner.segment, [0], 64, Operation.WRITE, 10.0)
    pieces = Pieces(segments.over(1, bytearray(16)), np.array([[0], [16], [0]]))
    asked, is_gone = threading.Event(), threading.Event()

    def keys(segment: Segment) -> tuple[int, int]:
        asked.set()
        is_gone.wait(60)
        return 0, 0

    owner.rail.keys = keys
    moving = asyncio.ensure_future(transport.move(owner.peer, grant, pieces, Priority.FOREGROUND))
    assert await asyncio.to_thread(asked.wait, 10)
    await transport.close()
    is_gone.set()
    with pytest.raises(TransferFailedError):
        await moving
    assert transport.refusal_or_none(owner.peer, owner.segment.segment_id, None) is None
    os.close(rail.channel_fd)


async def test_memory_of_gpus_at_both_ends_goes_by_the_rails(owner: Owner) -> None:
    owner.rail.refuses = False
    rail = DeviceRail("ours", refuses=False)
    rail.is_prompt = True
    transport = RdmaTransport(Registrations([rail], lambda device: NOWHERE), ManualClock())
    grant = owner.holdings.grant(owner.segment, [0], 64, Operation.WRITE, 10.0)
    assert transport.refusal_or_none(owner.peer, owner.segment.segment_id, 0) is None
    pieces = Pieces(of_gpu(), np.array([[0], [16], [0]]))
    await transport.move(owner.peer, grant, pieces, Priority.FOREGROUND)
    assert [key for _, key in rail.pairs[0].posted] == [2]
    await transport.close()
    os.close(rail.channel_fd)


async def test_our_own_memory_that_no_rail_takes_is_refused_by_name(owner: Owner) -> None:
    rail = DeviceRail("ours", refuses=True)
    registrations = Registrations([rail], lambda device: NOWHERE)
    transport = RdmaTransport(registrations, ManualClock())
    with pytest.raises(TransferFailedError):
        registrations.local(of_gpu())
    told = "our memory: ours: not by DMA-BUF"
    assert transport.refusal_or_none(owner.peer, owner.segment.segment_id, 0) == told
    assert transport.refusal_or_none(owner.peer, owner.segment.segment_id, None) is None
    await transport.close()
    os.close(rail.channel_fd)


async def test_an_agent_registers_a_gpus_memory_when_it_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rail = DeviceRail("ours", refuses=False)
    rail.close = lambda: os.close(rail.channel_fd)
    monkeypatch.setattr("transfer.rdma.transport.open_rails", lambda driver: ([rail], ""))
    monkeypatch.setattr("transfer.rdma.transport.device_refusal_or_none", lambda driver, device: None)
    config = TransferConfig(transports=("rdma", "tcp"))
    memory = bytearray(64)
    async with TransferAgent("us", 1, config, ManualClock()) as agent:
        agent.register_device(device_memory(memory))
        assert rail.asked == 1


@pytest.mark.gpu
def test_a_gpus_memory_is_exported_as_a_dma_buf() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((8 << 20) + 4096, dtype=torch.uint8, device="cuda")[512:]
    driver = CudaDriver()
    bus_id = driver.bus_id_or_none(tensor.device.index)
    assert bus_id is not None
    assert gpu_place(bus_id).path or not SYSFS.joinpath("bus/pci/devices", bus_id.lower()).exists()
    if (refusal := driver.refusal_or_none(tensor.device.index)) is not None:
        pytest.skip(refusal)
    with driver.exported(tensor.device.index, tensor.data_ptr(), tensor.numel()) as fd:
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/dmabuf:")
    # The context that the export used is the runtime's, and still good.
    assert int(tensor.sum()) == 0
