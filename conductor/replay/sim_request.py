"""A request on its way through a simulated cluster: its attempts, its prompt, its decoding."""

from __future__ import annotations

from base.request import NodeId, RequestId
from conductor.placing.placement import Placement, PlacementRequest
from conductor.placing.retries import Retries
from conductor.replay.links import Flow
from conductor.replay.outcome import Segment
from conductor.replay.trace import TraceRequest


class SimRequest:
    """One request, through one attempt or several. Its engine counts what is computed of it."""

    __slots__ = (
        "arrival_s",
        "asked",
        "beside_s",
        "chain",
        "computed_at_s",
        "computed_tokens",
        "context_tokens",
        "fetching",
        "finish_step",
        "first_segment",
        "first_token_s",
        "flow",
        "gaps",
        "is_promised",
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
        "prefilled_at_s",
        "prefix_tokens",
        "prompt_tokens",
        "request_id",
        "retries",
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
        self.request_id = RequestId(str(number))
        """The present attempt's name."""
        self.retries: Retries | None = None
        """None until an attempt was lost."""
        self.is_promised = False
        """Whether it was let wait: see `PlacementRequest`."""
        self.num_tokens = self.prompt_tokens
        """Tokens to have in the cache before the next: the prompt, and after a fault what came of it."""
        self.output_tokens = self.tokens_left = output_tokens
        """Tokens to make by the present attempt, the one of its prefill included."""
        self.asked: PlacementRequest
        self.placement: Placement
        self.flow: Flow | None = None
        self.fetching = False
        self.waits_for = 0
        self.tail_s: float
        """Seconds of its hand-off that come after the last of its prompt, whatever left before."""
        self.order = 0
        """Place among the prompts of all nodes: one that waited for its prefix goes before later ones."""
        self.started_at_s: float
        self.computed_at_s: float
        self.prefilled_at_s: float
        """When the present attempt's first token came."""
        self.beside_s: float
        """Seconds of its prefill that are in none of its chunks."""
        self.prefill_s: float
        self.prefix_tokens = 0
        self.computed_tokens: int
        """Tokens of its prompt, the prefix included."""
        self.first_token_s: float | None = None
        self.token_at_s = 0.0
        """When it had its last token before it joined a batch, or left one."""
        self.gaps: list[Segment] = []
        # of its decoding, which its engine keeps
        self.join_s = 0.0
        """Seconds of the first step, beside what any sequence takes."""
        self.steps_left: int
        """Brought up to date when it leaves a batch, as is its context."""
        self.context_tokens: int
        self.joined_at_s: float
        self.first_segment: int
        self.finish_step: int
        self.join_number: int

    @property
    def has_begun(self) -> bool:
        """Whether a token is out."""
        return self.first_token_s is not None

    def begin_again(self, lost_by: NodeId) -> bool:
        """Become another attempt, which has yet to be placed; False: there were enough."""
        if self.retries is None:
            self.retries = Retries()
            self.retries.num_attempts = 1
        self.retries.failed_at(lost_by)
        if not self.retries.may_try_again:
            return False
        self.request_id = RequestId(f"{self.number}.{self.retries.num_attempts}")
        self.retries.num_attempts += 1
        self.fetching = self.is_promised = False
        return True
