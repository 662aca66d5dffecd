"""The decode role of a node: reserve, receive, generate.

    Reserve --> blocks held, grant out --> Reserved
    Start   --> grant revoked, the sequence joins the batch
            --> all verified, prompt blocks published --> Tokens, Tokens, ... the last with a reason

Checksums are verified while the first step runs, because the client waits for that step. It writes to
the last block: where the device does not keep the order, that block is verified before. Until all are,
nothing that was computed from the blocks leaves this role and nothing is published.

One task for each request runs through this from top to bottom and owns what the request
holds; a `Release`, a deadline or the end of the conductor's stream cancels it wherever
it stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager

from base.clock import Clock
from base.errors import DeadlineError
from base.messages import FromNode, Reserve, Start, Work
from base.request import RequestId
from base.request_tasks import RequestTasks
from decode_node.reservation import Reservation, intact_in_order, require_intact, reserved
from engine.loop import EngineLoop
from engine.sequence import Sequence, sequence_of
from engine.token_stream import TokenStream
from kvstore.engine_store import EngineStore
from transfer.shard import NodeKv

LAST, ALL_BUT_LAST = slice(-1, None), slice(None, -1)


class DecodeRole:
    """Answers `Reserve` and `Start` messages. Belongs to the event loop."""

    def __init__(
        self,
        engine: EngineLoop,
        kv: NodeKv,
        group: asyncio.TaskGroup,
        send: Callable[[FromNode], None],
        clock: Clock,
        store: EngineStore | None = None,
    ) -> None:
        self._engine = engine
        self._kv = kv
        self._send = send
        self._clock = clock
        self._store = store
        self.tasks = RequestTasks(group, send)
        self._starts: dict[RequestId, asyncio.Future[Start]] = {}

    def reserve(self, message: Reserve) -> None:
        self.tasks.start(message.work.request_id, self._serve(message.work))

    def start(self, message: Start) -> None:
        """Let a reserved request begin; a start that comes too late is nothing."""
        started = self._starts.get(message.request_id)
        if started is not None and not started.done():
            started.set_result(message)

    async def _serve(self, work: Work) -> None:
        held: list[Sequence] = []
        self._engine.grammars.expect(work.sampling.grammar)
        try:
            async with asyncio.timeout(work.deadline_s):
                reservation, start = await self._receive(work, held)
                await self._generate(held[0], reservation, start)
        except TimeoutError:
            raise DeadlineError("the request did not end in time") from None
        finally:
            for sequence in held:
                if self._store is not None:
                    # The answer's blocks too: they are the prefix of the next turn.
                    published = sequence.block_hashes[: sequence.num_published_blocks]
                    self._store.offer(published, sequence.chain_root)
                self._engine.release(sequence)

    async def _receive(self, work: Work, held: list[Sequence]) -> tuple[Reservation, Start]:
        """Put into `held` the sequence, its KV in place. It owns its blocks from then on,
        though this coroutine may still be cancelled on its way out."""
        started: asyncio.Future[Start] = asyncio.get_running_loop().create_future()
        self._starts[work.request_id] = started
        try:
            async with reserved(self._engine.pool, self._kv, work) as reservation:
                self._send(reservation.answer(work.request_id))
                start = await started
                await reservation.close()
                held.append(self._sequence(work, reservation, start.first_token_id))
                return reservation, start
        finally:
            del self._starts[work.request_id]

    def _sequence(self, work: Work, reservation: Reservation, first_token_id: int) -> Sequence:
        sequence = sequence_of(work, self._clock.now_s())
        sequence.token_ids.append(first_token_id)
        sequence.num_computed_tokens = len(work.token_ids)
        sequence.block_table = reservation.take()
        sequence.block_hashes = list(reservation.chain)
        sequence.num_published_blocks = reservation.num_matched
        sequence.is_proven = False
        sequence.evict_first = work.evict_first
        # The conductor said that it may start when it had its first token for the client.
        sequence.had_token(self._clock.now_s())
        return sequence

    async def _generate(self, sequence: Sequence, reservation: Reservation, start: Start) -> None:
        answer = TokenStream(sequence.request_id, self._send)
        with self._held(reservation.block_ids):
            proof = intact_in_order(self._kv, reservation, start)
            try:
                await self._engine.grammars.constrain(sequence)
                if proof is None:
                    await require_intact(self._kv, reservation, start, LAST)
                self._engine.add(sequence, answer.on_output)
                await (proof or require_intact(self._kv, reservation, start, ALL_BUT_LAST))
            finally:
                del proof  # it holds what it raised, whose traceback holds this frame
            self._engine.proven(sequence)
        answer.open()
        await answer.ended()

    @contextmanager
    def _held(self, block_ids: Items[int]) -> Iterator[None]:
        """Preemption may take blocks from a sequence, and must not hand them to another meanwhile."""
        self._engine.pool.hold(block_ids)
        try:
            with self._engine.pool.sharing_nothing(block_ids):
                yield
        finally:
            self._engine.pool.release(block_ids)
