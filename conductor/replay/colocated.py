"""A simulated colocated cluster: every node prefills and decodes in the same steps.

The baseline that disaggregation is judged against, after vLLM: continuous batching with
chunked prefill. A step computes one token of each decoding sequence and, while a prompt
waits, one chunk of the first prompt. The chunk makes everybody's step longer; the weights
are read once for both. Prompts go to the node with the least prefill work and context, or,
cache-aware, to the one predicted to answer first.

Steps with the same prompt in prefill and the same batch are taken at once, as in
`decode_node.py`, but a chunk is a step at least: some ten events a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from math import ceil, inf

from conductor.cost_model import CostModel
from conductor.replay.block_cache import BlockCache
from conductor.replay.events import Events
from conductor.replay.outcome import Outcomes, Segment, worst_gaps_s
from conductor.replay.trace import TraceRequest

CHUNK_TOKENS = 512
"""Of a prompt in one step; vLLM's smaller setting, which favours TBT."""


class _Sequence:
    """One request on a node."""

    __slots__ = (
        "arrival_s",
        "context_tokens",
        "first_token_s",
        "gaps",
        "number",
        "output_tokens",
        "prefill_s",
        "prefix_tokens",
        "prompt_tokens",
        "row",
        "started_at_s",
        "steps_left",
    )

    def __init__(self, row: TraceRequest, number: int) -> None:
        self.row = row
        self.number = number
        self.arrival_s = row.arrival_s
        self.prompt_tokens = self.context_tokens = row.num_tokens
        self.output_tokens = row.output_tokens
        self.steps_left = row.output_tokens - 1
        self.gaps: list[Segment] = []
        self.started_at_s = 0.0
        self.first_token_s: float | None = None
        self.prefill_s = 0.0
        self.prefix_tokens = 0


class _Node:
    """One colocated node: prompts in order, a batch, a cache."""

    def __init__(self, name: str, cost: CostModel, block_size: int) -> None:
        self.name = name
        self.cost = cost
        self.block_size = block_size
        self.cache = BlockCache(cost.profile.host_kv_tokens // block_size)
        self.prompts: deque[_Sequence] = deque()
        self.batch: list[_Sequence] = []
        self.context_tokens = 0
        self.queued_s = 0.0
        self.chunks_left = 0
        self.chunk_s = 0.0
        self.is_stepping = False

    def take_prompt(self) -> None:
        """Begin the first prompt if none is under way and its KV fits."""
        if self.chunks_left or not self.prompts:
            return
        first = self.prompts[0]
        capacity = self.cost.profile.device_kv_tokens
        if self.batch and self.context_tokens + first.row.num_tokens > capacity:
            return
        row = first.row
        first.prefix_tokens = min(self.cache.match(row.chain) * self.block_size, row.num_tokens - 1)
        new_tokens = row.num_tokens - first.prefix_tokens
        first.prefill_s = self.cost.prefill_s(new_tokens, first.prefix_tokens)
        self.chunks_left = ceil(new_tokens / CHUNK_TOKENS)
        self.chunk_s = first.prefill_s / self.chunks_left

    def run(self) -> tuple[int, float, float]:
        """Return how many steps go alike, the seconds of the first, and the growth of each next."""
        steps = min([sequence.steps_left for sequence in self.batch], default=self.chunks_left)
        if self.chunks_left:
            steps = min(steps, self.chunks_left)
        growth_s = first_s = 0.0
        if self.batch:
            first_s = self.cost.decode_step_s(len(self.batch), self.context_tokens)
            growth_s = self.cost.profile.decode_context_token_s * len(self.batch)
        if self.chunks_left:
            shared_s = self.cost.profile.decode_fixed_s if self.batch else 0.0
            first_s = max(first_s, first_s + self.chunk_s - shared_s)
        return steps, first_s, growth_s


class ColocatedCluster:
    """One run. `run` may be called once."""

    def __init__(self, cost: CostModel, num_nodes: int, block_size: int) -> None:
        # what a request takes beside its prefill was measured on nodes that only prefill
        cost = CostModel(replace(cost.profile, request_s=0.0))
        self.outcomes = Outcomes(block_size)
        self.num_nodes = num_nodes
        self.now_s = 0.0
        self._nodes = [_Node(f"c{number}", cost, block_size) for number in range(num_nodes)]
        self._cost = cost
        self._events = Events()
        self._at = self._events.at

    def run(self, arrivals: Iterator[TraceRequest]) -> None:
        """Serve every request of `arrivals`, which come in order of time, to its end."""
        self._next_arrival(arrivals)
        while (next_s := self._events.next_s) < inf:
            self.now_s = next_s
            self._events.run_next()

    def _next_arrival(self, arrivals: Iterator[TraceRequest]) -> None:
        row = next(arrivals, None)
        if row is not None:
            self._at(row.arrival_s, self._arrived, row, arrivals)

    def _arrived(self, row: TraceRequest, arrivals: Iterator[TraceRequest]) -> None:
        self._next_arrival(arrivals)
        self._place(row)

    def _place(self, row: TraceRequest) -> None:
        node = min(self._nodes, key=lambda node: self._predicted_s(node, row))
        sequence = _Sequence(row, self.outcomes.num_arrived)
        self.outcomes.num_arrived += 1
        node.queued_s += self._own_s(node, row)
        node.prompts.append(sequence)
        if not node.is_stepping:
            self._step(node)

    def _own_s(self, node: _Node, row: TraceRequest) -> float:
        prefix = min(node.cache.match(row.chain) * node.block_size, row.num_tokens - 1)
        return self._cost.prefill_s(row.num_tokens - prefix, prefix)

    def _predicted_s(self, node: _Node, row: TraceRequest) -> tuple[float, int]:
        """Return the work before and of this prompt, and the context it would slow down."""
        return node.queued_s + self._own_s(node, row), node.context_tokens

    def _step(self, node: _Node) -> None:
        """Schedule the end of the next steps that go alike; one if a prompt could join sooner."""
        node.take_prompt()
        steps, first_s, growth_s = node.run()
        node.is_stepping = steps > 0
        if node.is_stepping:
            # a prompt that arrives meanwhile is taken at the next chunk or step boundary
            steps = min(steps, MAX_STEPS)
            seconds = steps * first_s + growth_s * steps * (steps - 1) / 2
            self._at(self.now_s + seconds, self._stepped, node, steps, first_s, growth_s)

    def _stepped(self, node: _Node, steps: int, first_s: float, growth_s: float) -> None:
        last_s = first_s + growth_s * (steps - 1)
        node.context_tokens += steps * len(node.batch)
        running: list[_Sequence] = []
        for sequence in node.batch:
            sequence.gaps.append((last_s, steps, growth_s))
            sequence.steps_left -= steps
            sequence.context_tokens += steps
            if sequence.steps_left:
                running.append(sequence)
            else:
                self._finish(node, sequence)
        node.batch = running
        if node.chunks_left:
            node.chunks_left -= steps
            if not node.chunks_left:
                self._prefilled(node)
        self._step(node)

    def _prefilled(self, node: _Node) -> None:
        sequence = node.prompts.popleft()
        node.queued_s = node.queued_s - sequence.prefill_s if node.prompts else 0.0
        node.cache.store(sequence.row.chain)
        sequence.first_token_s = self.now_s
        sequence.started_at_s = max(sequence.arrival_s, self.now_s - sequence.prefill_s)
        node.context_tokens += sequence.context_tokens
        if sequence.steps_left:
            node.batch.append(sequence)
        else:
            self._finish(node, sequence)

    def _finish(self, node: _Node, sequence: _Sequence) -> None:
        node.context_tokens -= sequence.context_tokens
        self.outcomes.completed(
            sequence,
            worst_gaps_s(sequence.gaps, sequence.output_tokens - 1),
            node.name,
            node.name,
            self.now_s,
        )
        if (turn := sequence.row.next_turn) is not None:
            arrival_s = self.now_s + turn.arrival_s
            self._at(arrival_s, self._place, turn._replace(arrival_s=arrival_s))


MAX_STEPS = 16
"""Steps taken at once where nothing is known to change: what a new prompt may wait."""
