"""Bytes between the memories of simulated processes: a `transfer.transport.Carriage`.

Two kinds, as there are in `transfer/`:

    served     (tcp) the owner's process looks at the grant when a batch arrives, and moves
               bytes as they come. What was sent arrives, though the asker gave up. The end of
               a grant leaves the rest of a batch alone at once.
    one-sided  (shm) the asker's process looks at the owner's board, and copies. The end of a
               grant is waited for until the copy is over, or the asker is dead.

Bytes move piece by piece with time between them, and at each the watches are asked whether
those bytes may be touched: whatever the grants say, by who holds the blocks.
"""

from __future__ import annotations

import asyncio

from base.errors import ServeError, StaleError, TransferFailedError
from base.grants import Endpoint, Operation

NAME = "tcp"
"""To the router, which has a prior for it."""
GONE_S = 0.05
"""From the end of a process to what its peers are told of it, if they are."""


class Wires:
    """All carriages of one cluster, by address."""

    def __init__(self, loop, network, rng, plan, trace):
        self.loop, self.network, self.rng, self.is_served = loop, network, rng, plan.is_served
        self._piece_s = plan.piece_s
        self.trace = trace
        self.peers = {}

    def carriage(self, process, epoch):
        """Return what an agent takes as `carriage`; the agent is told by `Carriage.agent`."""

        def make(holdings):
            carriage = Carriage(self, process, epoch, holdings)
            self.peers[carriage.address] = carriage
            return carriage

        return make

    def piece_s(self):
        return self._piece_s * self.rng.uniform(0.05, 1.0)


class Carriage:
    """One process's part of it; also its one transport."""

    name = NAME

    def __init__(self, wires, process, epoch, holdings):
        self.wires, self.process, self.epoch, self.holdings = wires, process, epoch, holdings
        self.address = f"{process.name}/{epoch}"
        self.agent = None
        self.incoming = []
        self._draining = {}

    @property
    def transports(self):
        return [self]

    @property
    def endpoints(self):
        return [Endpoint(NAME, self.address)]

    def refusal_or_none(self, peer, segment_id, device):
        return None if peer.address_or_none(NAME) else "no address"

    async def close(self):
        pass

    async def move(self, peer, grant, pieces, priority):
        theirs, pieces = self.wires.peers[peer.address_or_none(NAME)], pieces.merged()
        if theirs.process.is_dead:
            await asyncio.sleep(GONE_S)
            raise TransferFailedError("no such peer")
        move = (_Served if self.wires.is_served else _OneSided)(self, theirs, grant, pieces)
        self.wires.trace("moves", self.process.name, peer.node_id, grant.operation.name, pieces.num_bytes)
        await move.carry_out()

    def detach(self, generation, done):
        mine = [move for move in self.incoming if move.grant.generation == generation]
        for move in mine:
            move.detach()
        if self.wires.is_served or not mine:
            self.wires.loop.call_soon(done)
        else:
            self._draining[generation] = done

    def ended(self, move):
        """A one-sided copy is over; its owner may wait for that."""
        self.incoming.remove(move)
        generation = move.grant.generation
        if generation in self._draining and not any(
            each.grant.generation == generation for each in self.incoming
        ):
            done = self._draining.pop(generation)
            self.wires.loop.call_soon(done, context=self.process.context)

    def killed(self, is_told):
        """This process is dead: its copies are over, and who moves bytes with it learns of that."""
        for carriage in self.wires.peers.values():
            for move in list(carriage.incoming):
                if move.asker is self and not self.wires.is_served:
                    carriage.ended(move)
        if is_told:
            for move in list(self.incoming):
                move.fail(TransferFailedError("connection reset"))


class _OneSided:
    """The asker copies."""

    def __init__(self, asker, owner, grant, pieces):
        self.asker, self.owner, self.grant, self.pieces = asker, owner, grant, pieces

    async def carry_out(self):
        grant, owner, asker = self.grant, self.owner, self.asker
        pieces = self.pieces
        views = owner.holdings.views(
            grant.segment_id, grant.generation, grant.operation, pieces.peer_offsets, pieces.lengths
        )
        ours = asker.agent.takings(pieces.segment.segment_id, pieces.offsets) if _is_pool(pieces) else None
        owner.incoming.append(self)
        try:
            for mine, theirs in zip(pieces.views(), views, strict=True):
                owner.holdings.grants.require_live(grant.generation)
                half = len(mine) // 2
                _copy(self, mine[:half], theirs[:half], ours)
                await asyncio.sleep(asker.wires.piece_s())
                _copy(self, mine[half:], theirs[half:], ours)
            if owner.process.is_dead:
                raise TransferFailedError("the peer's process ended during the copy")
        finally:
            if self in owner.incoming:
                owner.ended(self)

    def detach(self):
        """It looks at the grant before each piece."""

    def fail(self, error):
        """It finds out at the end."""


class _Served:
    """The owner reads from or writes to its memory what the asker sends or asks for."""

    def __init__(self, asker, owner, grant, pieces):
        self.asker, self.owner, self.grant, self._pieces = asker, owner, grant, pieces
        wires, names = asker.wires, (asker.process.name, owner.process.name)
        self._there = wires.network.lane(*names, owner.process.context)
        self._back = wires.network.lane(*names, asker.process.context)
        self._number = wires.network.opened(self, *names)
        self._done = wires.loop.create_future()
        self._views = None
        self._is_detached = self._is_left = False
        self._landed = 0

    async def carry_out(self):
        pieces = self._pieces
        self._ours = (
            self.asker.agent.takings(pieces.segment.segment_id, pieces.offsets) if _is_pool(pieces) else None
        )
        self._there.send(self._begin)
        try:
            if self.grant.operation is Operation.WRITE:
                for index, view in enumerate(pieces.views()):
                    await asyncio.sleep(self.asker.wires.piece_s())
                    if self._done.done():
                        break
                    self._require_ours("a write's source")
                    self._there.send(self._write, index, bytes(view))
            await self._done
        finally:
            self._is_left = True
            # Cancelled before it waited for that: nobody will ask what came of it.
            if not self._done.cancel() and not self._done.cancelled():
                self._done.exception()

    def detach(self):
        self._is_detached = True
        self._back.send(self._end, StaleError("the grant was revoked"))

    def fail(self, error):
        self.asker.wires.loop.call_later(GONE_S, self._end, error, context=self.asker.process.context)
        self._over()

    def cut(self, told):
        self._there.is_cut = self._back.is_cut = True
        self._is_detached = True  # an owner whose connection is gone answers on none
        self._over()
        if told in (None, self.asker.process.name):
            self.fail(TransferFailedError("connection reset"))

    # in the owner's process

    def _begin(self):
        grant, pieces = self.grant, self._pieces
        try:
            self._views = self.owner.holdings.views(
                grant.segment_id, grant.generation, grant.operation, pieces.peer_offsets, pieces.lengths
            )
        except ServeError as error:
            self._is_detached = True
            self._back.send(self._end, error)
            return
        self.owner.incoming.append(self)
        if grant.operation is Operation.READ:
            self._answer(0)

    def _write(self, index, data):
        if self._is_detached:
            return
        self.owner.agent.require_granted(self.grant, "a write arrives")
        self._views[index][:] = data
        self._landed += 1
        if self._landed == len(self._views):
            self._over()
            self._back.send(self._end, None)

    def _answer(self, index):
        if self._is_detached:
            return
        if index == len(self._views):
            self._over()
            self._back.send(self._end, None)
            return
        self.owner.agent.require_granted(self.grant, "a read is answered")
        self._back.send(self._land, index, bytes(self._views[index]))
        self.owner.wires.loop.call_later(self.owner.wires.piece_s(), self._answer, index + 1)

    def _over(self):
        self.asker.wires.network.closed(self._number)
        if self in self.owner.incoming:
            self.owner.incoming.remove(self)

    # in the asker's

    def _land(self, index, data):
        if not self._is_left:
            self._require_ours("a read's target")
            self._pieces.views()[index][:] = data

    def _end(self, error):
        if self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)

    def _require_ours(self, what):
        if self._ours is not None:
            self.asker.agent.require_own(self._pieces.segment.segment_id, self._ours, what)


def _is_pool(pieces):
    """Whether our memory is a pool's, and no private copy of a fault's."""
    return pieces.segment.segment_id != 0


def _copy(move, mine, theirs, ours):
    grant, segment_id = move.grant, move.pieces.segment.segment_id
    if not move.owner.process.is_dead:
        move.owner.agent.require_granted(grant, f"a one-sided {grant.operation.name}")
    if ours is not None:
        move.asker.agent.require_own(segment_id, ours, f"our side of a one-sided {grant.operation.name}")
    if grant.operation is Operation.WRITE:
        theirs[:] = mine
    else:
        mine[:] = theirs
