"""The router: each batch goes by the fastest transport that reaches the segment.

"Fastest" is what was measured to this peer, or a prior until then. A transport that
failed a batch rests (`base/resting.py`), so that a broken path costs one batch its time
and not every one; that batch goes on by the next transport.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from base.clock import Clock
from base.errors import TransferFailedError
from base.grants import Grant, PeerDescriptor
from base.logs import event
from base.resting import Resting
from base.transports import TRANSPORTS
from transfer.batch import Pieces, Priority
from transfer.transport import MEASURED_FROM_BYTES, STAGED, TransferFacts, TransferObserver, Transport

COOLDOWN_S = 1.0
MAX_COOLDOWN_S = 60.0
_WEIGHT = 0.2
RANKED_FOR_S = 1.0
"""How long a ranking of transports is good for: to ask each of them takes longer than to copy 64 KiB."""
MAX_RANKINGS = 4096
MAX_PEERS = 1024
"""Peers of which rates and rests are known. Beyond that the one met first is met anew."""

log = logging.getLogger(__name__)


def prior_bytes_per_s(name: str) -> float:
    """Return the rate of a transport in the ranking until it was measured; staged: half of its carrier's."""
    carrier = name.removeprefix(STAGED)
    prior = TRANSPORTS[carrier].prior_bytes_per_s
    return prior if carrier == name else prior / 2


class _PeerRates:
    """Rates and rests of the transports to one epoch of a peer."""

    def __init__(self, epoch: int, clock: Clock) -> None:
        self.epoch = epoch
        self.resting = Resting(clock, COOLDOWN_S, MAX_COOLDOWN_S)
        self.bytes_per_s: dict[str, float] = {}
        """The rate of each transport by its name, once measured."""
        self.refusals: set[tuple[str, str]] = set()
        """Transports and why they refused this peer, as it was logged."""

    def rate(self, name: str) -> float:
        return self.bytes_per_s.get(name, prior_bytes_per_s(name))

    def succeeded(self, name: str, num_bytes: int, seconds: float) -> None:
        self.resting.succeeded(name)
        if num_bytes >= MEASURED_FROM_BYTES and seconds > 0:
            rate = self.rate(name)
            self.bytes_per_s[name] = rate + _WEIGHT * (num_bytes / seconds - rate)


class Router:
    """Owns the transports and what is known of each peer. One event loop calls it."""

    def __init__(
        self,
        transports: Sequence[Transport],
        clock: Clock,
        absent: Mapping[str, str] | None = None,
        observers: Sequence[TransferObserver] = (),
    ) -> None:
        """`absent`: why each configured transport that cannot work here cannot."""
        self._observers = observers
        self._absent = {} if absent is None else absent
        self._transports = {transport.name: transport for transport in transports}
        self._clock = clock
        self._peers: dict[str, _PeerRates] = {}
        self._rankings: dict[tuple[str, int, int, int | None], tuple[float, list[str]]] = {}
        """Transports, best first, and until when: by peer, its epoch, its segment and our memory's device."""

    def add(self, transport: Transport) -> None:
        """Offer one more."""
        self._transports[transport.name] = transport
        self._rankings.clear()

    async def move(self, peer: PeerDescriptor, grant: Grant, pieces: Pieces, priority: Priority) -> None:
        """Carry out one batch; raises as `Transport.move`.

        Where a transport fails, the next takes the batch from its beginning: it puts the
        same bytes in the same places, and the grant is checked again.
        """
        known = self._known(peer)
        names = self._names(peer, grant.segment_id, pieces.segment.device)
        for name in names:
            batch = TransferFacts(peer.node_id, name, grant, pieces.num_bytes)
            for observer in self._observers:
                observer.begun(batch)
            begun_s = self._clock.now_s()
            try:
                await self._transports[name].move(peer, grant, pieces, priority)
            except BaseException as error:
                self._ended(batch, begun_s, error)
                if not isinstance(error, TransferFailedError):
                    raise
                known.resting.failed(name)
                self._rankings.clear()
                if name is names[-1]:
                    raise
                event(log, "transport failed", level=logging.WARNING, transport=name, reason=error)
            else:
                known.succeeded(name, batch.num_bytes, self._ended(batch, begun_s, None))
                return

    async def close(self) -> None:
        """Close every transport."""
        for transport in self._transports.values():
            await transport.close()

    def _ended(self, batch: TransferFacts, begun_s: float, error: BaseException | None) -> float:
        """Notify observers; return the seconds that the batch took."""
        seconds = self._clock.now_s() - begun_s
        for observer in self._observers:
            observer.ended(batch, seconds, error)
        return seconds

    def _names(self, peer: PeerDescriptor, segment_id: int, device: int | None) -> list[str]:
        """Return the transports to try, in order, as ranked now or a moment ago; raises as `_ranked`."""
        now_s = self._clock.now_s()
        key = (peer.node_id, peer.epoch, segment_id, device)
        until_s, names = self._rankings.get(key, (0.0, []))
        if until_s <= now_s:
            if len(self._rankings) >= MAX_RANKINGS:
                self._rankings.clear()
            names = self._ranked(peer, segment_id, device)
            self._rankings[key] = (now_s + RANKED_FOR_S, names)
        return names

    def _ranked(self, peer: PeerDescriptor, segment_id: int, device: int | None) -> list[str]:
        """Return the transports that reach the segment, best first.

        Raises:
            TransferFailedError: none reaches it.
        """
        known = self._known(peer)
        usable: list[str] = []
        refused = list(self._absent.items())
        for name, transport in self._transports.items():
            refusal = transport.refusal_or_none(peer, segment_id, device)
            if refusal is None:
                usable.append(name)
                continue
            refused.append((name, refusal))
            if (name, refusal) not in known.refusals:
                known.refusals.add((name, refusal))
                event(log, "transport refused", peer=peer.node_id, transport=name, reason=refusal)
        if not usable:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
            raise TransferFailedError(f"nothing reaches {peer.node_id}: {reasons or 'no transport'}")
        usable.sort(key=lambda name: (name not in known.resting, known.rate(name), name), reverse=True)
        return usable

    def _known(self, peer: PeerDescriptor) -> _PeerRates:
        known = self._peers.get(peer.node_id)
        if known is None or known.epoch != peer.epoch:
            if known is None and len(self._peers) >= MAX_PEERS:
                del self._peers[next(iter(self._peers))]
            known = self._peers[peer.node_id] = _PeerRates(peer.epoch, self._clock)
        return known
