"""A storage process as a node of a cluster: it reports to the conductor what it holds, and lends it.

The conductor's index is the directory of a live cluster. A storage process that attaches is
in it like any node, with no role: nothing is computed there, and its blocks can be read.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from base.block_hash import BlockHash
from base.grants import PeerDescriptor
from base.messages import FromNode, Heartbeat, KvEvents, Lend, NodeInfo, Registered, Release, ToNode
from base.request import NodeId
from base.request_tasks import RequestTasks
from kvstore.findable import Findable
from kvstore.lending import lend_stored
from kvstore.store import Store


def storage_info(node_id: str, peer: PeerDescriptor, num_blocks: int) -> NodeInfo:
    """Return what a storage process says of itself. Its blocks may be of any model."""
    return NodeInfo(
        node_id=NodeId(node_id),
        epoch=peer.epoch,
        roles=frozenset(),
        model_id="",
        layout_id="",
        max_model_len=0,
        num_blocks=num_blocks,
        block_size=0,
        peer=peer,
        host=socket.gethostname(),
    )


class AttachedStore:
    """Answers `Lend` messages for one store: a `base.attach.NodeWork`."""

    def __init__(self, store: Store, group: asyncio.TaskGroup, send: Callable[[FromNode], None]) -> None:
        self._store = store
        self._send = send
        self._tasks = RequestTasks(group, send)
        self._findable = Findable(lambda _: False, store.__contains__)
        self._num_heartbeats = 0
        self._next_event = 1
        self._is_followed = False
        """Whether the conductor has had a snapshot, and hears of each change after it."""
        store.on_change(self._changed)

    def attached(self, lease: Registered) -> None:
        pass  # nothing here is for one conductor alone

    def receive(self, items: list[ToNode]) -> None:
        for item in items:
            match item:
                case Lend():
                    self._tasks.start(item.request_id, lend_stored(self._store, item, self._send))
                case Release():
                    self._tasks.end(item.request_id)
                case _:
                    pass  # needs a role, and we said that we have none

    def heartbeat(self) -> Heartbeat:
        self._num_heartbeats += 1
        books = self._store.pool.accounts()
        return Heartbeat(
            sequence=self._num_heartbeats,
            num_free_blocks=books.free + books.cached,
            num_held_blocks=books.held + books.in_transfer,
            num_waiting=0,
            num_running=0,
            num_queued_tokens=0,
            num_context_tokens=0,
            next_kv_event=self._next_event,
        )

    def kv_events(self) -> KvEvents | None:
        stored, removed = self._findable.take((), ())
        if not stored and not removed:
            return None
        return self._numbered(KvEvents(self._next_event, False, tuple(stored), tuple(removed)))

    def kv_snapshot(self) -> KvEvents:
        self._is_followed = True
        self._findable.take((), ())  # the snapshot says it all
        return self._numbered(KvEvents(self._next_event, True, tuple(self._store.hashes), ()))

    def lost(self) -> None:
        self._is_followed = False
        self._findable.take((), ())
        self._tasks.end_all()

    def _changed(self, names: Sequence[BlockHash]) -> None:
        # While a conductor is away, as long as that may be, nothing is kept for it.
        if self._is_followed:
            self._findable.store_changed(names)

    def _numbered(self, events: KvEvents) -> KvEvents:
        self._next_event = events.next_number
        return events
