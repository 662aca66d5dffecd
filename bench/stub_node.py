"""A node without a model: it takes the time that a profile says, and makes tokens up.

For benches and tests of the conductor, whose other side it is (`base.attach.NodeWork`): one
prompt after another is prefilled, all running sequences decode in one batch, and the tokens
of a step leave in one message. It holds no KV; the blocks of prompts that it has prefilled are
reported as a node would, matched from then on, and lent: who loads them takes the time that the
profile has for a transfer. What it does ends when the profile says, and not
a timer's resolution later each time: that would make of a prompt of 0.1 ms one of 2.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from base.block_hash import BlockHash, hash_chain
from base.errors import LostError
from base.grants import Grant, Operation
from base.messages import (
    Failed,
    FromNode,
    Heartbeat,
    KvEvents,
    Lend,
    Lent,
    Prefill,
    Prefilled,
    PrefillTimes,
    Registered,
    Release,
    Reserve,
    Reserved,
    Serve,
    Start,
    Tokens,
    ToNode,
    Work,
)
from base.request import FinishReason, RequestId, Role, SampledToken, TokenLogprobs
from conductor.placing.cost_model import CostModel

TOKEN = SampledToken(5)
VECTOR = array("f", [0.5] * 576).tobytes()
"""As long as SmolLM2's."""
GRANT = Grant(1, 2, Operation.WRITE, (0,), 1, 10.0)


def _token(work: Work) -> SampledToken:
    """Return the token that a sequence is said to have sampled, with as many others as it asked for."""
    if work.num_logprobs is None:
        return TOKEN
    return SampledToken(
        5, TokenLogprobs(-0.5, tuple((100 + place, -1.0) for place in range(work.num_logprobs)))
    )


class _Running:
    __slots__ = ("context_tokens", "token", "tokens_left")

    def __init__(self, work: Work) -> None:
        self.token = _token(work)
        self.context_tokens = len(work.token_ids)
        self.tokens_left = work.stop.max_tokens - 1 - len(work.token_ids) + work.num_prompt_tokens


class _Prompt:
    __slots__ = ("came_at_s", "chain", "is_pooled", "loaded_at_s", "source", "stays", "work")

    def __init__(self, asked: Prefill, chain: list[BlockHash], came_at_s: float, load_s: float) -> None:
        self.source = asked.source
        self.loaded_at_s = came_at_s + load_s
        self.stays = asked.stays
        self.is_pooled = asked.pooling is not None
        self.work = asked.work
        self.chain = chain
        self.came_at_s = came_at_s


class StubNode:
    """Belongs to the event loop, on whose clock it takes its time."""

    def __init__(self, cost: CostModel, num_blocks: int, block_size: int) -> None:
        self.send: Callable[[FromNode], None] = lambda item: None
        self._cost = cost
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._known: set[BlockHash] = set()
        self._news: list[BlockHash] = []
        self._next_event = 1
        self._beats = 0
        self._roles: frozenset[Role] = frozenset()
        self._reserved: dict[RequestId, Work] = {}
        self._prompts: deque[_Prompt] = deque()
        self._running: dict[RequestId, _Running] = {}
        self._work_came = asyncio.Event()
        self._batch_came = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._prefill_all())
            group.create_task(self._decode_all())

    def receive(self, items: list[ToNode]) -> None:
        for item in items:
            match item:
                case Reserve(work):
                    self._reserved[work.request_id] = work
                    self.send(Reserved(work.request_id, 0, GRANT))
                case Prefill(work):
                    chain = hash_chain(work.token_ids, self._block_size, work.chain_root)
                    now_s = asyncio.get_running_loop().time()
                    num_loaded = len(item.source.checksums) if item.source else 0
                    load_s = self._cost.transfer_s(num_loaded * self._block_size)
                    self._prompts.append(_Prompt(item, chain, now_s, load_s))
                    self._work_came.set()
                case Start(request_id):
                    self._running[request_id] = _Running(self._reserved[request_id])
                    self._batch_came.set()
                case Release(request_id):
                    self._reserved.pop(request_id, None)
                    self._running.pop(request_id, None)
                case Serve(roles):
                    self._roles = roles
                case Lend():
                    self.send(self._lent(item))

    def attached(self, lease: Registered) -> None:
        pass

    def heartbeat(self) -> Heartbeat:
        self._beats += 1
        held = sum(len(work.token_ids) for work in self._reserved.values()) // self._block_size
        return Heartbeat(
            sequence=self._beats,
            num_free_blocks=self._num_blocks - held,
            num_held_blocks=held,
            num_waiting=len(self._prompts),
            num_running=len(self._running),
            num_queued_tokens=sum(
                len(prompt.work.token_ids) - self._matched(prompt) for prompt in self._prompts
            ),
            num_context_tokens=sum(running.context_tokens for running in self._running.values()),
            num_step_rows=len(self._running),
            roles=self._roles,
            fence=1,
            next_kv_event=self._next_event,
        )

    def kv_events(self) -> KvEvents | None:
        if not self._news:
            return None
        events = KvEvents(self._next_event, False, tuple(self._news), ())
        self._next_event = events.next_number
        self._news = []
        return events

    def kv_snapshot(self) -> KvEvents:
        self._news = []
        events = KvEvents(self._next_event, True, tuple(self._known), ())
        self._next_event = events.next_number
        return events

    def lost(self) -> None:
        self._reserved.clear()
        self._prompts.clear()
        self._running.clear()

    async def _prefill_all(self) -> None:
        loop = asyncio.get_running_loop()
        free_at_s = 0.0
        while True:
            await self._work_came.wait()
            self._work_came.clear()
            while self._prompts:
                prompt = self._prompts[0]
                work, matched = prompt.work, self._matched(prompt)
                could_begin_at_s = max(free_at_s, prompt.came_at_s)
                began_at_s = max(could_begin_at_s, prompt.loaded_at_s)
                free_at_s = began_at_s + self._cost.prefill_s(len(work.token_ids) - matched, matched)
                await _until(free_at_s)
                if not self._prompts:
                    break
                self._prompts.popleft()
                self._news += [key for key in prompt.chain if key not in self._known]
                self._known.update(prompt.chain)
                queue_s, load_s = began_at_s - prompt.came_at_s, began_at_s - could_begin_at_s
                times = PrefillTimes(queue_s, loop.time() - began_at_s, 0.0, load_s)
                running = _Running(work)
                stays = prompt.stays and running.tokens_left > 0
                prefilled = Prefilled(work.request_id, running.token, None, matched, (), times, stays=stays)
                if prompt.is_pooled:
                    prefilled = prefilled._replace(
                        first_token=None, finish_reason=FinishReason.STOP, embedding=VECTOR
                    )
                self.send(prefilled)
                if stays:
                    self._reserved[work.request_id] = work
                    self._running[work.request_id] = running
                    self._batch_came.set()

    async def _decode_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._batch_came.wait()
            self._batch_came.clear()
            free_at_s = loop.time()
            while self._running:
                # who comes during a step is in the next one
                batch = list(self._running.items())
                context_tokens = sum(running.context_tokens for _, running in batch)
                free_at_s += self._cost.decode_step_s(len(batch), context_tokens)
                await _until(free_at_s)
                for request_id, running in batch:
                    if request_id not in self._running:
                        continue
                    running.tokens_left -= 1
                    running.context_tokens += 1
                    reason = None if running.tokens_left > 0 else FinishReason.LENGTH
                    self.send(Tokens(request_id, (running.token,), reason))
                    if reason is not None:
                        del self._running[request_id]
                        self._reserved.pop(request_id, None)

    def _lent(self, asked: Lend) -> Lent | Failed:
        num_blocks = self._depth(asked.chain) - asked.first_block
        if num_blocks <= 0:
            return Failed(asked.request_id, LostError.__name__, "the blocks were evicted")
        grant = replace(GRANT, operation=Operation.READ, offsets=(0,) * num_blocks)
        return Lent(asked.request_id, grant, (0,) * num_blocks)

    def _matched(self, prompt: _Prompt) -> int:
        """Return the tokens of a prompt that need not be computed; its last one is."""
        depth = self._depth(prompt.chain)
        if (source := prompt.source) and depth >= source.first_block:
            depth = max(depth, source.first_block + len(source.checksums))
        return min(depth * self._block_size, len(prompt.work.token_ids) - 1)

    def _depth(self, chain: Sequence[BlockHash]) -> int:
        """Return how many leading blocks are here."""
        return next((at for at, key in enumerate(chain) if key not in self._known), len(chain))


async def _until(due_s: float) -> None:
    """Return at `due_s` by the loop's clock; where that is past, in the loop's next turn."""
    await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))
