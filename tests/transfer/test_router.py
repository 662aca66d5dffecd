"""Which transport a batch takes, and what happens when one fails."""

import asyncio
import gc

import numpy as np
import pytest

from base.errors import StaleError, TransferFailedError
from base.grants import Grant, Operation, PeerDescriptor
from base.resting import Resting
from tests.manual_clock import ManualClock
from transfer.batch import Pieces, Priority
from transfer.owned import segment as segments
from transfer.router import COOLDOWN_S, MAX_PEERS, RANKED_FOR_S, Router
from transfer.transport import MEASURED_FROM_BYTES, TransferFacts, TransferObserver

PEER = PeerDescriptor("peer", 1, ())
GRANT = Grant(5, 1, Operation.WRITE, (0,), MEASURED_FROM_BYTES, 1.0)
PIECES = Pieces(segments.over(1, bytearray(MEASURED_FROM_BYTES)), np.array([[0], [MEASURED_FROM_BYTES], [0]]))


class Stub:
    """A transport that takes `seconds` and ends as it is told."""

    def __init__(self, name: str, clock: ManualClock, seconds: float = 1e-3) -> None:
        self.name = name
        self.clock = clock
        self.seconds = seconds
        self.refusal: str | None = None
        self.error: Exception | None = None
        self.moves = 0

    def refusal_or_none(self, peer: PeerDescriptor, segment_id: int, device: int | None) -> str | None:
        return self.refusal

    async def move(self, peer: PeerDescriptor, grant: Grant, pieces: Pieces, priority: Priority) -> None:
        self.moves += 1
        self.clock.advance(self.seconds)
        if self.error is not None:
            raise self.error

    async def close(self) -> None:
        return


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def shm(clock: ManualClock) -> Stub:
    return Stub("shm", clock)


@pytest.fixture
def tcp(clock: ManualClock) -> Stub:
    return Stub("tcp", clock)


@pytest.fixture
def router(clock: ManualClock, shm: Stub, tcp: Stub) -> Router:
    return Router([tcp, shm], clock, {"rdma": "no device"})


async def send(router: Router) -> None:
    await router.move(PEER, GRANT, PIECES, Priority.FOREGROUND)


async def test_the_faster_of_two_is_taken(router: Router, shm: Stub, tcp: Stub) -> None:
    await send(router)
    assert (shm.moves, tcp.moves) == (1, 0)


async def test_what_does_not_reach_the_segment_is_passed_over(router: Router, shm: Stub, tcp: Stub) -> None:
    shm.refusal = "private memory"
    await send(router)
    assert (shm.moves, tcp.moves) == (0, 1)


async def test_when_nothing_reaches_the_segment_every_reason_is_told(
    router: Router, shm: Stub, tcp: Stub
) -> None:
    shm.refusal, tcp.refusal = "private memory", "no endpoint"
    with pytest.raises(TransferFailedError, match="rdma: no device; tcp: no endpoint; shm: private memory"):
        await send(router)


async def test_why_a_transport_is_refused_is_logged_once_for_each_reason(
    router: Router, shm: Stub, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    # what is refused depends on the batch's memory, too: of two kinds of it each may come again and again
    for refusal in ("another host", "another host", "our memory is a GPU's", "another host"):
        shm.refusal = refusal
        clock.advance(RANKED_FOR_S)
        await send(router)
    logged = [record.getMessage() for record in caplog.records if "transport refused" in record.getMessage()]
    assert [line.partition("reason=")[2] for line in logged] == ['"another host"', '"our memory is a GPU\'s"']


async def test_measured_bandwidth_outweighs_the_prior(router: Router, shm: Stub, tcp: Stub) -> None:
    shm.seconds = 0.1
    for _ in range(20):
        await send(router)
    before = shm.moves, tcp.moves
    await send(router)
    assert (shm.moves, tcp.moves) == (before[0], before[1] + 1)
    assert before[0] > 0


async def test_a_batch_goes_by_the_ranking_of_a_moment_ago_until_something_fails(
    router: Router, shm: Stub, tcp: Stub, clock: ManualClock
) -> None:
    shm.seconds = tcp.seconds = 0.0
    await send(router)
    shm.refusal = "gone"
    await send(router)
    assert (shm.moves, tcp.moves) == (2, 0)
    shm.error = TransferFailedError("gone")
    await send(router)
    assert (shm.moves, tcp.moves) == (3, 1)
    shm.refusal = shm.error = None
    clock.advance(COOLDOWN_S)
    await send(router)
    assert (shm.moves, tcp.moves) == (4, 1)
    shm.refusal = "gone"
    clock.advance(RANKED_FOR_S)
    await send(router)
    assert (shm.moves, tcp.moves) == (4, 2)


async def test_a_batch_whose_transport_fails_goes_on_by_the_next(
    router: Router, shm: Stub, tcp: Stub
) -> None:
    shm.error = TransferFailedError("broken")
    await send(router)
    assert (shm.moves, tcp.moves) == (1, 1)
    await send(router)
    assert (shm.moves, tcp.moves) == (1, 2)


async def test_a_transport_that_failed_is_tried_again_after_its_rest(
    router: Router, shm: Stub, clock: ManualClock
) -> None:
    shm.error = TransferFailedError("broken")
    await send(router)
    shm.error = None
    clock.advance(COOLDOWN_S)
    await send(router)
    assert shm.moves == 2


async def test_a_refusal_by_the_owner_is_not_taken_elsewhere(router: Router, shm: Stub, tcp: Stub) -> None:
    shm.error = StaleError("revoked")
    with pytest.raises(StaleError):
        await send(router)
    assert tcp.moves == 0


class Watcher(TransferObserver):
    def __init__(self) -> None:
        self.under_way: list[TransferFacts] = []
        self.over: list[tuple[str, str, int, float, str]] = []

    def begun(self, batch: TransferFacts) -> None:
        self.under_way.append(batch)

    def ended(self, batch: TransferFacts, seconds: float, error: BaseException | None) -> None:
        self.under_way.remove(batch)
        self.over.append((batch.peer, batch.transport, batch.num_bytes, seconds, type(error).__name__))


async def test_an_observer_is_notified_of_each_transport_that_a_batch_was_given_to(
    shm: Stub, tcp: Stub, clock: ManualClock
) -> None:
    watcher = Watcher()
    router = Router([tcp, shm], clock, observers=[watcher])
    shm.seconds, shm.error = 0.5, TransferFailedError("broken")
    tcp.seconds, tcp.error = 0.25, asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await send(router)
    tcp.error = None
    await send(router)
    assert not watcher.under_way
    assert watcher.over == [
        ("peer", "shm", MEASURED_FROM_BYTES, 0.5, "TransferFailedError"),
        ("peer", "tcp", MEASURED_FROM_BYTES, 0.25, "CancelledError"),
        ("peer", "tcp", MEASURED_FROM_BYTES, 0.25, "NoneType"),
    ]


async def test_what_is_known_of_peers_is_bounded(clock: ManualClock, tcp: Stub) -> None:
    """A cluster that grows and shrinks for months meets ever new ones."""

    def num_rests() -> int:
        gc.collect()
        return sum(type(each) is Resting for each in gc.get_objects())

    router, before = Router([tcp], clock), num_rests()
    for number in range(MAX_PEERS + 500):
        await router.move(PeerDescriptor(f"node-{number}", 1, ()), GRANT, PIECES, Priority.FOREGROUND)
        clock.advance(RANKED_FOR_S)
    assert num_rests() - before < MAX_PEERS + 100
    await router.close()
