"""Measures the path of KV from one prefill node to one decode node: what `conductor doctor` asks for.

    Reserve -> the decode node    sets blocks aside
    Prefill -> the prefill node   computes them and writes them there
    Release -> both               nothing of it is kept that a request could match

They are the messages of a request that was placed by hand: so it is the transport that requests take, with
all that can refuse it, and nodes know of nothing new. How fast the bytes went is in the prefill node's own
metrics (`transfer_link_bytes_per_second`). Its blocks hang on a root of their own: nothing matches them, and
they are evicted in their turn.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from typing import Any

from base.block_hash import HASH_BYTES, BlockHash
from base.errors import ServeError, StaleError
from base.messages import Granted, Prefill, Prefilled, Reserve, Reserved, Work
from base.request import NodeId, RequestId, SamplingParams, StopParams
from conductor.serving.membership import Membership
from conductor.serving.nodes import Mailbox, NodeSession

NUM_TOKENS = 512
"""One chunk by default on a CPU; of the smallest models some MiB of KV."""

TIMEOUT_S = 20.0
"""The time that one pair has, on a cluster at work."""


class LinkCheck:
    """Measures one pair after the other. Belongs to the event loop."""

    def __init__(self, membership: Membership, rng: random.Random) -> None:
        self._membership = membership
        self._rng = rng
        self._turn = asyncio.Lock()
        self._num_checks = 0

    async def measure(self, name: str) -> dict[str, Any] | None:
        """Send KV from one node to another; return how it went, None: there are no such nodes.

        Args:
            name: `PREFILL_NODE,DECODE_NODE`.
        """
        prefill_id, _, decode_id = name.partition(",")
        try:
            prefill = self._membership.session(NodeId(prefill_id))
            decode = self._membership.session(NodeId(decode_id))
        except StaleError:
            return None
        async with self._turn:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    num_blocks = await self._sent(prefill, decode)
            except TimeoutError:
                return {"blocks": 0, "problem": f"nothing came within {TIMEOUT_S:g} s"}
            except ServeError as error:
                return {"blocks": 0, "problem": f"{type(error).__name__}: {error}"}
        return {"blocks": num_blocks, "problem": ""}

    async def _sent(self, prefill: NodeSession, decode: NodeSession) -> int:
        """Return how many blocks were written."""
        self._num_checks += 1
        work, mailbox = self._work(min(prefill.info.max_model_len, decode.info.max_model_len)), Mailbox()
        with ExitStack() as held:
            decode.begin(work.request_id, mailbox)
            held.callback(decode.end, work.request_id)
            decode.send(Reserve(work))
            reserved = await mailbox.next(Reserved)
            sent = RequestId(f"{work.request_id}.prefill")
            prefill.begin(sent, mailbox)
            held.callback(prefill.end, sent)
            prefill.send(Prefill(work._replace(request_id=sent)))
            first, target = reserved.num_matched_blocks, decode.info.peer
            prefill.send(Granted(sent, first, target, reserved.grant, reserved.ranks))
            prefilled = await mailbox.next(Prefilled)
        return len(prefilled.checksums)

    def _work(self, max_model_len: int) -> Work:
        num_tokens = min(NUM_TOKENS, max_model_len - 1)
        return Work(
            request_id=RequestId(f"link-check-{self._num_checks}"),
            token_ids=tuple(range(1, num_tokens + 1)),
            num_prompt_tokens=num_tokens,
            chain_root=BlockHash(self._rng.randbytes(HASH_BYTES)),
            sampling=SamplingParams(),
            stop=StopParams(1),
            num_logprobs=None,
            priority=0,
            deadline_s=TIMEOUT_S,
        )
