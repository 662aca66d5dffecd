"""The prefill role of a node: a prompt in, its KV in the reservation and a token out.

For each `Prefill` the engine computes the sequence up to its first new token, matching
what the node holds already, while the sender writes finished blocks to where `Granted` says, which
comes meanwhile. `Prefilled` is sent when the last write is acknowledged: from then on the decode
node has all of it, and this node holds nothing but cached blocks.

Where the decode node is this one, the sequence stays: nothing is reserved, written or compared, and the
engine goes on with it. Where a vector is wanted in place of tokens, nothing is drawn, written or kept either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from base.clock import Clock
from base.errors import DeadlineError
from base.messages import FromNode, Granted, Prefill, Prefilled, PrefillTimes, Source, Work
from base.request import FinishReason, Pooling, RequestId
from base.request_tasks import RequestTasks
from base.together import Begin, beside
from engine.loop import EngineLoop
from engine.sequence import Sequence, sequence_of
from engine.step import LaunchedChunk, SequenceOutput
from engine.token_stream import TokenStream, failure_of
from kvstore.engine_store import EngineStore
from prefill_node.prefix_loader import Prefix, PrefixSource, loaded_prefix
from prefill_node.sender import Destination, KvSender, PrefillObserver
from transfer.shard import NodeKv


@dataclass(frozen=True, slots=True)
class _Computed:
    """A prompt that is computed, and written or here to stay."""

    sequence: Sequence
    sender: KvSender | None
    first: SequenceOutput
    answer: TokenStream
    """The tokens after the first, of a sequence that stays."""
    times: PrefillTimes


class PrefillRole:
    """Answers `Prefill` messages. Belongs to the event loop."""

    def __init__(
        self,
        engine: EngineLoop,
        kv: NodeKv,
        group: asyncio.TaskGroup,
        send: Callable[[FromNode], None],
        clock: Clock,
        lent: Callable[[Source], PrefixSource] | None = None,
        store: EngineStore | None = None,
        observers: Items[PrefillObserver] = (),
    ) -> None:
        """Begin without work.

        Args:
            lent: Makes a prefix source of what another node lends; None: nothing is loaded from
                there, but computed.
            store: Of this node; None: it has none.
        """
        self._engine = engine
        self._kv = kv
        self._lent = lent
        self._observers = observers
        self._send = send
        self._clock = clock
        self._store = store
        self.tasks = RequestTasks(group, send)
        self._destinations: dict[RequestId, Destination] = {}
        engine.on_stall(self._let_go)

    def prefill(self, message: Prefill) -> None:
        name, is_written = message.work.request_id, not message.stays and message.pooling is None
        destination = Destination() if is_written else None
        task = self.tasks.start(name, self._prefill(message, destination))
        if task is not None and destination is not None:
            self._destinations[name] = destination
            task.add_done_callback(lambda _: self._destinations.pop(name))

    def granted(self, message: Granted) -> None:
        """Let a prompt's blocks be written; of a request that has ended it is nothing."""
        destination = self._destinations.get(message.request_id)
        if destination is not None:
            destination.granted(message)

    def _let_go(self) -> bool:
        """Give up the oldest prompt that holds blocks for a decode node which does not answer.

        A decode node that hangs is lost with its lease, long after those who wait for blocks here. One that
        is only late may still answer for the others. Returns whether there is such a prompt.
        """
        oldest = next((each for each in self._destinations.values() if each.num_waiting), None)
        if oldest is not None:
            oldest.give_up()
        return oldest is not None

    async def _prefill(self, message: Prefill, destination: Destination | None) -> None:
        arrived_at_s = self._clock.now_s()
        self._engine.grammars.expect(message.work.sampling.grammar)
        try:
            async with asyncio.timeout(message.work.deadline_s):
                done = await self._computed(message, destination, arrived_at_s, self._engine.prefix_parts)
                # What was being loaded is not what it should be: what was made of it is dropped.
                done = done or await self._computed(message, destination, arrived_at_s, ())
                assert done is not None, "what is loaded before is never found out later"
                if message.stays:
                    await self._go_on(message.work, done)
                else:
                    self._send_prefilled(message.work, done)
        except TimeoutError:
            raise DeadlineError("the prompt, or what was generated here, did not end in time") from None

    def _send_prefilled(self, work: Work, done: _Computed) -> None:
        for observer in self._observers:
            observer.prefilled(work.request_id, done.times)
        if self._store is not None:
            num_tokens = len(work.token_ids)
            self._store.computed(num_tokens - done.sequence.num_matched_tokens, done.times.compute_s)
            full = num_tokens // self._kv.layout.block_size
            self._store.offer(done.sequence.block_hashes[:full], done.sequence.chain_root)
        is_over = done.first.finish_reason is FinishReason.STOP
        is_pooled = done.sequence.pooling is not None
        is_scored = done.sequence.num_prompt_logprobs is not None
        self._send(
            Prefilled(
                work.request_id,
                None if is_pooled else done.first.tokens[0],
                FinishReason.STOP if is_over else None,
                done.sequence.num_matched_tokens,
                done.sender.checksums if done.sender else (),
                done.times,
                done.sender.parts if done.sender else (),
                stays=done.sender is None and done.first.finish_reason is None,
                prompt_logprobs=done.sequence.prompt_logprobs if is_scored else None,
                embedding=done.sequence.vector() if is_pooled else None,
            )
        )

    async def _go_on(self, work: Work, done: _Computed) -> None:
        """Send the tokens of a sequence that stays until it ends, and release it."""
        sequence = done.sequence
        try:
            self._send_prefilled(work, done)
            done.answer.open()
            if done.first.finish_reason is None:
                await done.answer.ended()
        finally:
            if self._store is not None:
                # The answer's blocks too: they are the prefix of the next turn.
                published = sequence.block_hashes[: sequence.num_published_blocks]
                self._store.offer(published, sequence.chain_root)
            self._engine.release(sequence)

    async def _computed(
        self,
        message: Prefill,
        destination: Destination | None,
        arrived_at_s: float,
        parts: tuple[int, ...],
    ) -> _Computed | None:
        """Compute a prompt and write it to its reservation; None: from a prefix that proved wrong.

        A sequence that stays is the caller's to release, if it is returned.
        """
        news: asyncio.Queue[SequenceOutput | LaunchedChunk] = asyncio.Queue()
        answer = TokenStream(message.work.request_id, self._send)
        make = sequence_of if message.stays else one_token_sequence
        sequence, sender = make(message.work, arrived_at_s), None
        if destination is not None:
            node = self._kv, self._engine.pool
            sender = KvSender(*node, message.work, destination, self._clock, self._observers)
        sequence.num_prompt_logprobs, sequence.pooling = message.num_prompt_logprobs, message.pooling

        def listen(output: SequenceOutput) -> None:
            is_rest = sequence.num_tokens > len(message.work.token_ids) + len(output.tokens)
            (answer.on_output if is_rest else news.put_nowait)(output)

        is_kept = False
        try:
            async with self._loaded_prefix(message, parts) as prefix:
                loaded_at_s = self._clock.now_s()
                await self._engine.grammars.constrain(sequence)
                prefix.give_to(sequence, self._kv.layout.block_size)
                self._engine.add(sequence, listen, news.put_nowait if sender else None)
                async with beside() as begin:
                    first, num_chunks = await self._compute(sequence, sender, news, begin)
                    computed_at_s = self._clock.now_s()
                if not await prefix.is_intact():
                    return None
                self._engine.proven(sequence)
            # The decode node has it only now, and keeps nothing of what has ended.
            sequence.evict_first = message.work.evict_first and first.finish_reason is not FinishReason.STOP
            is_kept = message.stays
        finally:
            if not is_kept:
                self._engine.release(sequence)
        started_at_s = sequence.started_at_s or arrived_at_s
        waited_s = sequence.arrivals.waited_s if sequence.arrivals is not None else 0.0
        times = PrefillTimes(
            queue_s=started_at_s - arrived_at_s,
            compute_s=computed_at_s - started_at_s - waited_s,
            exposed_transfer_s=self._clock.now_s() - computed_at_s,
            exposed_load_s=loaded_at_s - arrived_at_s + waited_s,
            bubble_s=max(computed_at_s - started_at_s - sequence.busy_s, 0.0) if sequence.busy_s else 0.0,
            transfer_s=sender.transfer_s if sender else 0.0,
            num_chunks=num_chunks,
        )
        return _Computed(sequence, sender, first, answer, times)

    def _loaded_prefix(self, message: Prefill, parts: tuple[int, ...]) -> AbstractAsyncContextManager[Prefix]:
        sources: list[PrefixSource] = [] if self._store is None else [self._store]
        if message.num_prompt_logprobs is not None or message.pooling not in (None, Pooling.LAST):
            sources = []  # what is loaded has K and V, and neither logits nor hidden states
        elif message.source is not None and self._lent is not None:
            sources.append(self._lent(message.source))
        block_size = self._kv.layout.block_size
        return loaded_prefix(self._engine.pool, block_size, message.work, sources, self._clock, parts)

    async def _compute(
        self,
        sequence: Sequence,
        sender: KvSender | None,
        news: asyncio.Queue[SequenceOutput | LaunchedChunk],
        begin: Begin,
    ) -> tuple[SequenceOutput, int]:
        """Return the output with the first token, or a vector's last, and how many steps it took.

        What each step finished is being written.
        """
        num_chunks = 0
        while True:
            output = await news.get()
            if isinstance(output, LaunchedChunk):
                assert sender is not None, "only a sender asks for launches"
                sender.send_launched(begin, output)
                continue
            num_chunks += 1
            if output.finish_reason is FinishReason.ERROR:
                raise failure_of(sequence)
            if sender is not None:
                sender.send_finished(begin, sequence.block_table, sequence.num_computed_tokens)
            if output.tokens or output.finish_reason is not None:
                return output, num_chunks


def one_token_sequence(work: Work, arrived_at_s: float) -> Sequence:
    """Return the sequence that ends with the first new token of `work`."""
    num_generated = len(work.token_ids) - work.num_prompt_tokens
    return sequence_of(work._replace(stop=work.stop._replace(max_tokens=num_generated + 1)), arrived_at_s)
