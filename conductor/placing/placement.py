"""Placement: what the scheduler is asked and what it answers. Values only: nobody changes one.

They are not frozen, as values are elsewhere, because one of each is made for every request, and a frozen
dataclass of fourteen fields takes ten times as long to make (11 us against 1; 2.5 GHz Xeon, 2026-11-21), a
fifth of a whole placement. Nor are they named tuples, of which a field takes three times as long to read
(30 ns against 10), and placement reads some forty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from base.request import NodeId, RequestId, Slo
from kvstore.index import Key

UNBOUNDED = Slo()


@dataclass(slots=True)
class PlacementRequest:
    """A request, as far as placement needs to know it."""

    request_id: RequestId
    chain: Sequence[Key]
    """Hashes of the prompt's blocks, first to last."""
    num_tokens: int
    """Tokens of the prompt."""
    max_tokens: int
    """New tokens at most; 0: a vector is wanted of the prompt, and nothing decodes."""
    slo: Slo = UNBOUNDED
    priority: int = 0
    waited_s: float = 0.0
    """Seconds between arrival and placement, which its TTFT bound has lost already."""
    is_promised: bool = False
    """Whether it was let wait because it was predicted to keep its bounds."""
    avoid: Sequence[NodeId] = ()
    """Nodes that failed attempts before this one: chosen where no other will do."""

    def past_line(self, ahead_s: float) -> PlacementRequest:
        """Return it as placed now, before others who wait and were counted in its own wait with `ahead_s`."""
        return replace(self, waited_s=self.waited_s - ahead_s) if ahead_s else self


@dataclass(slots=True)
class Placement:
    """The nodes that serve a request, and the predictions that chose them."""

    request_id: RequestId
    prefill_node: NodeId
    decode_node: NodeId
    """The prefill node where nothing decodes."""
    matched_tokens: int
    """Leading prompt tokens that need not be computed, fetched ones included."""
    local_blocks: int
    """Leading blocks that the prefill node holds itself."""
    matched_blocks: int
    """Leading blocks that need not be computed; those past `local_blocks` are fetched."""
    source_node: NodeId | None
    """Where to fetch them; None: nothing is fetched."""
    decode_matched_blocks: int
    """Leading blocks that the decode node holds already."""
    queue_s: float
    fetch_s: float
    """Overlaps the queue: the blocks travel while the request waits."""
    prefill_s: float
    handoff_s: float
    """Seconds of the hand-off that show after the last layer is computed."""
    predicted_ttft_s: float
    predicted_tbt_s: float
    dispatch_s: float = 0.0
    """Learned: messages and the event loops' turns. In the predicted TTFT."""
    is_inline: bool = False
    """The decode node computes the prompt, beside what it generates."""
    prompt_share: float = 1.0
    """The prompt's share of the computing node's time: what decodes there has the rest. In `prefill_s`."""


class RejectReason(Enum):
    """Why a request was refused before any work was done for it."""

    NO_PREFILL_NODE = "no_prefill_node"
    NO_DECODE_NODE = "no_decode_node"
    NO_FREE_BLOCKS = "no_free_blocks"
    TTFT = "ttft"
    TBT = "tbt"
    WAITED = "waited"
    """The request waited to be placed as long as it may, or would have."""
    TOO_MANY_WAIT = "too_many_wait"

    @property
    def is_of_queue(self) -> bool:
        """Whether it was refused by those who wait, and `place` was not asked."""
        return self in (RejectReason.WAITED, RejectReason.TOO_MANY_WAIT)


@dataclass(slots=True)
class Rejection:
    """Why not, what was predicted, and when asking again is worth it."""

    request_id: RequestId
    reason: RejectReason
    retry_after_s: float
    predicted_ttft_s: float = 0.0
    predicted_tbt_s: float = 0.0
    has_room: bool = False
    """The decode pool would have held it: its room is left to several shorter ones."""
