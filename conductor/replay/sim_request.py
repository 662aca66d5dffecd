"""A request on its way through a simulated cluster: its attempts, its prompt, its decoding."""

from __future__ import annotations

from base.request import RequestId
from conductor.placing.placement import Placement
from conductor.replay.links import Flow
from conductor.replay.outcome import Segment
from conductor.replay.trace import TraceRequest


class SimRequest:
    """One request, through one attempt or several. Its engine counts what is computed of it."""

    __slots__ = (
        "arrival_s",
        "attempt",
        "beside_s",
        "chain",
        "computed_tokens",
        "context_tokens",
        "fetching",
        "finish_step",
        "first_segment",
        "first_token_s",
        "flow",
        "gaps",
        "join_number",
        "join_s",
        "joined_at_s",
        "next_turn",
        "num_tokens",
        "number",
        "order",
        "output_tokens",
        "placement",
        "prefill_s",
        "prefix_tokens",
        "prompt_tokens",
        "request_id",
        "started_at_s",
        "steps_left",
        "tail_s",
        "token_at_s",
        "tokens_left",
        "waits_for",
    )

    def __init__(self, row: TraceRequest, number: int, output_limit: int | None = None) -> None:
        self.arrival_s, self.prompt_tokens, output_tokens, self.chain, self.next_turn = row
        if output_limit is not None and output_limit < output_tokens:
            output_tokens = output_limit
        self.number = number
        self.attempt = 0
        self.request_id = RequestId(str(number))
        """Of the present attempt."""
        self.num_tokens = self.prompt_tokens
        """To have in the cache before the next token: the prompt, and after a fault what came of it."""
        self.output_tokens = self.tokens_left = output_tokens
        """Of the present attempt, the token that its prefill makes included."""
        self.placement: Placement
        self.flow: Flow | None = None
        self.fetching = False
        self.waits_for = 0
        self.tail_s = 0.0
        """Of its hand-off, that comes after the last of its prompt whatever left before."""
        self.order = 0
        """Among the prompts of all nodes: a prompt that waited for its prefix goes before later ones."""
        self.started_at_s = 0.0
        self.beside_s = 0.0
        """Of its prefill, in none of its chunks."""
        self.prefill_s = 0.0
        self.prefix_tokens = 0
        self.computed_tokens = 0
        """Of its prompt, the prefix included."""
        self.first_token_s: float | None = None
        self.token_at_s = 0.0
        """Of its last token before it joined a batch, or left one."""
        self.gaps: list[Segment] = []
        # of its decoding
        self.join_s = 0.0
        """Of the first step, beside what any sequence takes."""
        self.steps_left = 0
        """Brought up to date when it leaves a batch, as is its context."""
        self.context_tokens = 0
        self.joined_at_s = 0.0
        self.first_segment = 0
        self.finish_step = 0
        self.join_number = 0

    def begin_again(self) -> None:
        """Become another attempt, which has yet to be placed."""
        self.attempt += 1
        self.request_id = RequestId(f"{self.number}.{self.attempt}")
        self.fetching = False
