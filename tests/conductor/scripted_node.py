"""A node that does what a test tells it to, over a real stream or none."""

from __future__ import annotations

from base.grants import Endpoint, Grant, Operation, PeerDescriptor
from base.messages import (
    Failed,
    Granted,
    Heartbeat,
    KvEvents,
    NodeInfo,
    Prefill,
    Prefilled,
    PrefillTimes,
    Release,
    Reserve,
    Reserved,
    Start,
    Tokens,
)
from base.request import FinishReason, Role, SampledToken

BLOCK_SIZE = 16
MODEL_ID = "model"
GRANT = Grant(1, 2, Operation.WRITE, (0, 100), 100, 10.0)
TIMES = PrefillTimes(0.0, 0.0, 0.0)


def node_info(node_id="n0", roles=(Role.PREFILL, Role.DECODE), epoch=1, **change):
    fields = {
        "model_id": MODEL_ID,
        "layout_id": "layout",
        "max_model_len": 4096,
        "num_blocks": 100,
        "block_size": BLOCK_SIZE,
        "peer": PeerDescriptor(node_id, epoch, (Endpoint("tcp", "127.0.0.1:1"),)),
        "host": "here",
    }
    return NodeInfo(node_id=node_id, epoch=epoch, roles=frozenset(roles), **fields | change)


class ScriptedWork:
    """`base.attach.NodeWork`: answers as a healthy node would, and writes down what it got.

    `silent_on` names a message class that it never answers; `Tokens`: of a sequence that stays it tells the
    first alone. One that `is_full` refuses reservations.
    """

    def __init__(self, answer_tokens=(11, 12, 13), silent_on=None, is_full=False):
        self.send = None
        self.received = []
        self.num_lost = 0
        self.done = set()
        self.asked = {}
        self.snapshot = ()
        self._answer = answer_tokens
        self._silent_on = silent_on
        self.is_full = is_full
        self._beats = 0

    def attached(self, lease):
        pass

    def receive(self, items):
        self.received += items
        for item in items:
            if type(item) is not self._silent_on:
                for answer in self._answers(item):
                    self.send(answer)

    def _answers(self, item):
        match item:
            case Reserve(work) if self.is_full:
                self.done.add(work.request_id)
                return [Failed(work.request_id, "CapacityError", "another conductor was there first")]
            case Reserve(work):
                return [Reserved(work.request_id, 0, GRANT)]
            case Prefill(work) if not item.stays:
                self.asked[work.request_id] = item
            case Granted(request_id) if request_id in self.asked:
                self.done.add(request_id)
                return [self.prefilled(self.asked[request_id].work)]
            case Prefill(work):
                rest = [] if self._silent_on is Tokens else self._tokens(work.request_id)
                return [self.prefilled(work, stays=True), *rest]
            case Start(request_id):
                return self._tokens(request_id)
        return []

    def _tokens(self, request_id):
        *middle, last = self._answer[1:]
        self.done.add(request_id)
        answers = [Tokens(request_id, (SampledToken(token),), None) for token in middle]
        return [*answers, Tokens(request_id, (SampledToken(last),), FinishReason.LENGTH)]

    def prefilled(self, work, stays=False):
        token = SampledToken(self._answer[0] + len(work.token_ids) - work.num_prompt_tokens)
        return Prefilled(work.request_id, token, None, 0, (1, 2), TIMES, stays=stays)

    def heartbeat(self):
        self._beats += 1
        return Heartbeat(self._beats, 100, 0, 0, 0, 0, 0)

    def kv_events(self):
        return None

    def kv_snapshot(self):
        return KvEvents(1, True, tuple(self.snapshot), ())

    def lost(self):
        self.num_lost += 1

    def held(self):
        """Return the ids that were reserved or prefilled, not released, and not answered to the end."""
        held = set()
        for item in self.received:
            match item:
                case Reserve(work) | Prefill(work):
                    held.add(work.request_id)
                case Release(request_id):
                    held.discard(request_id)
        return held - self.done
