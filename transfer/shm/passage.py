"""Small batches over shared memory, one after the other: what the first was found to need serves the next.

64 KiB that lie in the cache are copied in 1 us. To find the way, the peer, its memory and its word that the
grant is live takes two, so it is found once for 0.1 ms. What may end sooner is looked at for each batch: the
hold on the grant, which the event loop lets go of at its next turn, and the generation on the owner's board.
"""

from __future__ import annotations

from base.clock import SystemClock
from base.errors import StaleError
from base.grants import Operation
from transfer.batch import TransferBatch
from transfer.shm.copies import require_alive
from transfer.shm.mapped import MappedPeer
from transfer.transport import MEASURED_FROM_BYTES, Opening

OPEN_S = 100e-6
"""Then it is asked again whether the peer lives. One that ended meanwhile has what was put into its memory
as one that ends a moment later has."""
_now_s = SystemClock().now_s


class ShmPassage:
    """The event loop's, as the hold on the grant is."""

    __slots__ = (
        "_at",
        "_covers_one",
        "_generation",
        "_grant",
        "_is_read",
        "_kept",
        "_measured",
        "_ours",
        "_room",
        "_segment",
        "_tally",
        "_theirs",
        "_until_s",
        "_words",
    )

    def __init__(self, peer: MappedPeer, wanted: Opening) -> None:
        """Hold the grant until the loop's next turn; raises as `Transport.move`."""
        board, grant, ours, allowed = peer.board, wanted.grant, wanted.ours, wanted.allowed
        self._theirs = board.memory_of(grant.segment_id)
        if allowed.end > self._theirs.nbytes:
            raise StaleError("the peer's segment has another size")
        board.keep(grant)
        require_alive(peer)
        self._kept, (self._words, self._at) = board.kept(), board.generation_of(grant)
        self._grant, self._generation = grant, grant.generation
        self._is_read = grant.operation is Operation.READ
        self._segment, self._ours, self._room = ours, ours.memory, ours.num_bytes
        self._covers_one = allowed.covers_one
        self._tally, self._measured = wanted.tally, wanted.measured
        self._until_s = _now_s() + OPEN_S

    def carried(self, batch: TransferBatch) -> bool:
        """See `Passage.carried`."""
        only, begun_s = batch.only, _now_s()
        if (
            only is None
            or batch.segment is not self._segment
            or begun_s > self._until_s
            or self._kept.get(self._generation) is not self._grant
            or self._words[self._at] != self._generation
        ):
            return False
        source, length, target = only
        offset, peer_offset = (target, source) if self._is_read else (source, target)
        # What is not allowed is for whoever says so in words.
        if not 0 <= offset <= self._room - length or not self._covers_one(peer_offset, length):
            return False
        if self._is_read:
            self._ours[offset : offset + length] = self._theirs[peer_offset : peer_offset + length]
        else:
            self._theirs[peer_offset : peer_offset + length] = self._ours[offset : offset + length]
        tally = self._tally
        tally.batches += 1
        tally.num_bytes += length
        if length >= MEASURED_FROM_BYTES:
            self._measured(length, _now_s() - begun_s)
        return True
