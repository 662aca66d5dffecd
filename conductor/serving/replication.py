"""Carries out on the nodes what `placing/replicas.py` decides: copies of hot prefixes, and their end.

    Lend   -> a holder     its blocks stay what they are until the exchange ends
    Fetch  -> the target   reads them into its cache, compares checksums, publishes
    Forget -> a holder     when the prefix is cold

The nodes obey the conductor in control alone (`node/work.py`). A copy that fails is
nothing lost: it is thought about again while the prefix is hot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import cast

from base.block_hash import BlockHash
from base.clock import Clock
from base.errors import LostError, ProtocolError, ServeError
from base.logs import event
from base.messages import Fetch, Fetched, Forget, Lend, Lent, Source
from base.request import NodeId, RequestId
from conductor.placing.cluster_view import ClusterView
from conductor.placing.replicas import COPY_TIMEOUT_S, Copy, Drop, Replicas
from conductor.serving.membership import Membership
from conductor.serving.nodes import Mailbox, NodeSession

log = logging.getLogger(__name__)

STEP_S = 1.0


class Replication:
    """Belongs to the event loop."""

    def __init__(self, replicas: Replicas, view: ClusterView, membership: Membership, clock: Clock) -> None:
        self._replicas = replicas
        self._view = view
        self._membership = membership
        self._clock = clock
        self._num_copies = 0

    async def run(self) -> None:
        """Replicate until cancelled, while this conductor is in control."""
        while True:
            await asyncio.sleep(STEP_S)
            if self._membership.in_control():
                await self.step()

    async def step(self) -> None:
        """Do what is to be done now; return when it is done or has failed."""
        todo = self._replicas.step(self._view, self._clock.now_s())
        async with asyncio.TaskGroup() as group:
            for item in todo:
                if isinstance(item, Drop):
                    self._drop(item)
                else:
                    # their names now: a slot may be another node's when the task runs
                    source, target = self._session(item.source_slot), self._session(item.target_slot)
                    if source is not None and target is not None:
                        group.create_task(self._copy(item, source.info.node_id, target.info.node_id))

    def _session(self, slot: int) -> NodeSession | None:
        """Return the node in `slot`; None: it has left, and taken its copies along."""
        try:
            return self._membership.session(self._view.node_at(slot).info.node_id)
        except (KeyError, LostError):
            return None

    def _drop(self, item: Drop) -> None:
        session = self._session(item.slot)
        if session is not None:
            session.send(Forget(cast(tuple[BlockHash, ...], tuple(item.blocks)), session.fence))
            event(log, "replica dropped", node=session.info.node_id, blocks=len(item.blocks))

    async def _copy(self, item: Copy, source: NodeId, target: NodeId) -> None:
        try:
            async with asyncio.timeout(COPY_TIMEOUT_S):
                num_blocks = await self._copied(item, source, target)
        except (ServeError, TimeoutError) as error:
            event(log, "no replica", source=source, target=target, reason=f"{type(error).__name__}: {error}")
        else:
            event(log, "replica", source=source, target=target, blocks=num_blocks)

    async def _copied(self, item: Copy, source: NodeId, target: NodeId) -> int:
        """Return how many blocks of the chain the target has then."""
        self._num_copies += 1
        name = f"replica-{self._num_copies}"
        chain = cast(Sequence[BlockHash], tuple(item.chain))
        mailbox = Mailbox()
        lender, taker = self._membership.session(source), self._membership.session(target)
        with ExitStack() as held:
            lend = RequestId(f"{name}.lend")
            held.enter_context(lender.exchange(lend, mailbox))
            lender.send(Lend(lend, tuple(chain), COPY_TIMEOUT_S, item.first_block))
            lent = await mailbox.next()
            if not isinstance(lent, Lent):
                raise ProtocolError(f"{type(lent).__name__} where Lent was expected")
            found = Source(lender.info.peer, lent.grant, lent.checksums, item.first_block)
            held.enter_context(taker.exchange(RequestId(name), mailbox))
            taker.send(Fetch(RequestId(name), tuple(chain), found, taker.fence))
            fetched = await mailbox.next()
            if not isinstance(fetched, Fetched):
                raise ProtocolError(f"{type(fetched).__name__} where Fetched was expected")
        return fetched.num_blocks
