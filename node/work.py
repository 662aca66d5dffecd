"""The work of a node for each of its conductors, and the state that all of them share.

A node is attached to each conductor of its cluster by a stream of its own. What one of them
asked for is in roles of its own (`ConductorWork`), so that it ends with that stream and no
other's does. The engine, its cache and its blocks are one: a reservation is granted or refused
here, where the blocks are, whoever asks, and each conductor sees the others' load in the
heartbeats.

`SharedState` holds what must not be done by two at once: it says which conductor is in control,
and obeys that one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from base.block_hash import BlockHash
from base.messages import (
    ExpertLoad,
    Granted,
    Heartbeat,
    KvEvents,
    Lend,
    Prefill,
    Registered,
    Release,
    Reserve,
    Serve,
    Start,
    ToNode,
)
from base.request import Role
from decode_node.role import DecodeRole
from engine.build import Engine
from engine.step import StepPlan
from kvstore.findable import Findable
from kvstore.store import Store
from node.own_cache import Lender
from prefill_node.role import PrefillRole


class Control:
    """Says which conductor may order how the node serves: of those attached, the one with the smallest epoch.

    All nodes then name the same one, with no word between them. Each change has a number, the
    fence: an order that was sent under an earlier one is void, also from the one in control.
    """

    def __init__(self, roles: frozenset[Role]) -> None:
        self.roles = roles
        self._attached: list[int] = []
        self._fence = 0

    def attached(self, epoch: int) -> None:
        self._change([*self._attached, epoch])

    def left(self, epoch: int) -> None:
        self._change([other for other in self._attached if other != epoch])

    def fence(self, epoch: int) -> int:
        """Return the fence for the conductor in control; 0 for any other."""
        return self._fence if self._attached and self._attached[0] == epoch else 0

    def obey(self, epoch: int, order: Serve) -> bool:
        """Serve as ordered; False: the order is void."""
        if order.fence == 0 or order.fence != self.fence(epoch):
            return False
        self.roles = order.roles
        return True

    def _change(self, attached: list[int]) -> None:
        before = self._attached[:1]
        self._attached = sorted(attached)
        if self._attached[:1] != before:
            self._fence += 1


class KvNews:
    """The blocks that became findable on the node or were forgotten, for each of several listeners.

    The engine's cache reports each once; here it is kept for everybody until they ask. A listener
    that has not asked for a snapshot yet is kept nothing.
    """

    def __init__(self, take: Callable[[], tuple[Iterable[BlockHash], Iterable[BlockHash]]]) -> None:
        """`take` returns (stored, removed) since its last call, net."""
        self._take = take
        self._changes: dict[object, dict[BlockHash, bool]] = {}

    def begin(self, listener: object) -> None:
        """Keep what happens from now on."""
        self._note()
        self._changes[listener] = {}

    def end(self, listener: object) -> None:
        self._changes.pop(listener, None)

    @property
    def has_listeners(self) -> bool:
        return bool(self._changes)

    def take(self, listener: object) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        """Return (stored, removed) since the listener's last call, net."""
        self._note()
        changes = self._changes.get(listener)
        if not changes:
            return (), ()
        self._changes[listener] = {}
        stored = tuple(name for name, is_here in changes.items() if is_here)
        return stored, tuple(name for name, is_here in changes.items() if not is_here)

    def _note(self) -> None:
        stored, removed = self._take()
        for changes in self._changes.values():
            for names, is_here in ((removed, False), (stored, True)):
                for name in names:
                    # a change that undoes one not yet taken is none
                    if changes.get(name, is_here) != is_here:
                        del changes[name]
                    else:
                        changes[name] = is_here


class SharedState:
    """The state of the node that all its conductors share."""

    def __init__(self, engine: Engine, roles: frozenset[Role], store: Store | None) -> None:
        pool = engine.pool
        findable = Findable(pool.__contains__, lambda name: store is not None and name in store)
        self.engine = engine
        self.control = Control(roles)
        self.news = KvNews(lambda: findable.take(*pool.take_events()))
        self._store = store
        self.is_leaving = False
        """Whether the process is to stop, once its requests have ended."""
        self._wakes: list[Callable[[], None]] = []
        self.num_step_prompt_tokens = 0
        """Tokens of prompts of the last step that computed anything."""
        engine.loop.on_step(self._stepped)
        # Conductors count on free blocks, so they hear of them at once.
        pool.on_release(self.changed)

        def store_changed(names: Sequence[BlockHash]) -> None:
            # While no conductor is there, as long as that may be, nothing is kept for one.
            if self.news.has_listeners:
                findable.store_changed(names)
                self.changed()

        if store is not None:
            store.on_change(store_changed)

    def snapshot(self) -> tuple[BlockHash, ...]:
        """Return every block that can be found on the node."""
        stored = self._store.hashes if self._store is not None else ()
        return tuple(dict.fromkeys([*self.engine.pool.snapshot(), *stored]))

    def expert_load(self) -> ExpertLoad | None:
        """Return how evenly tokens went to experts in the last minutes; None: they go to none."""
        experts = self.engine.experts
        return experts.load() if experts is not None else None

    def _stepped(self, plan: StepPlan, seconds: float, ended_at_s: float) -> None:
        if plan.entries:
            decoding = (entry.sequence.first_token_at_s is not None for entry in plan.entries)
            self.num_step_prompt_tokens = plan.num_tokens - sum(decoding)
            if self.num_step_prompt_tokens:
                self.changed()  # blocks of a prompt can be found before the prompt is done

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever its conductor should hear of the node's state."""
        self._wakes.append(wake)

    def changed(self, but: Callable[[], None] | None = None) -> None:
        """Let all conductors know, `but` one that knows."""
        for wake in self._wakes:
            if wake is not but:
                wake()


class ConductorWork:
    """The work of the node for one conductor: a `base.attach.NodeWork`."""

    def __init__(
        self,
        state: SharedState,
        wake: Callable[[], None],
        prefill: PrefillRole,
        decode: DecodeRole,
        lender: Lender,
    ) -> None:
        self._state = state
        self._wake = wake
        state.on_change(wake)
        self._prefill = prefill
        self._decode = decode
        self._lender = lender
        self._tasks = (lender.tasks, prefill.tasks, decode.tasks)
        self._num_heartbeats = 0
        self._next_event = 1
        self._epoch: int | None = None

    def attached(self, lease: Registered) -> None:
        self._epoch = lease.conductor_epoch
        self._state.control.attached(self._epoch)
        self._state.engine.loop.predict_steps(lease.step_cost)
        self._state.changed()

    def receive(self, items: list[ToNode]) -> None:
        for item in items:
            match item:
                case Reserve():
                    self._decode.reserve(item)
                case Prefill():
                    self._prefill.prefill(item)
                case Granted():
                    self._prefill.granted(item)
                case Start():
                    self._decode.start(item)
                case Lend():
                    self._lender.lend(item)
                case Release():
                    for tasks in self._tasks:
                        tasks.end(item.request_id)
                case Serve():
                    if self._epoch is not None and self._state.control.obey(self._epoch, item):
                        self._wake()  # placement goes by the roles that are reported
        if items:
            # The other conductors place by what they see of this one's load.
            self._state.changed(but=self._wake)

    def heartbeat(self) -> Heartbeat:
        self._num_heartbeats += 1
        pool, scheduler = self._state.engine.loop.pool, self._state.engine.loop.scheduler
        control, is_busy = self._state.control, scheduler.num_running > 0
        return Heartbeat(
            sequence=self._num_heartbeats,
            num_free_blocks=pool.num_available,
            num_held_blocks=pool.num_held,
            num_shared_blocks=pool.num_shared,
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_queued_tokens=scheduler.num_remaining_tokens,
            num_context_tokens=scheduler.num_context_tokens,
            is_draining=self._state.is_leaving,
            roles=control.roles,
            fence=0 if self._epoch is None else control.fence(self._epoch),
            next_kv_event=self._next_event,
            num_step_rows=scheduler.num_decoding,
            num_step_prompt_tokens=self._state.num_step_prompt_tokens if is_busy else 0,
            step_budget_tokens=scheduler.chunk_tokens,
            experts=self._state.expert_load(),
        )

    def kv_events(self) -> KvEvents | None:
        stored, removed = self._state.news.take(self)
        if not stored and not removed:
            return None
        return self._numbered(KvEvents(self._next_event, False, stored, removed))

    def kv_snapshot(self) -> KvEvents:
        self._state.news.begin(self)
        return self._numbered(KvEvents(self._next_event, True, self._state.snapshot(), ()))

    def lost(self) -> None:
        self._state.news.end(self)
        if self._epoch is not None:
            self._state.control.left(self._epoch)
            self._epoch = None
            self._state.changed()
        for tasks in self._tasks:
            tasks.end_all()

    async def idle(self) -> None:
        """Return when no request is at work."""
        await self._decode.tasks.idle()
        await self._prefill.tasks.idle()

    @property
    def num_requests(self) -> int:
        return len(self._prefill.tasks) + len(self._decode.tasks)

    def _numbered(self, events: KvEvents) -> KvEvents:
        self._next_event = events.next_number
        return events
