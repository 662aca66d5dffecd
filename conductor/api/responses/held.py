"""Responses that a client may go on from, by `previous_response_id`.

A conversation is held as the tokens that the nodes have computed, so that the next turn's prompt begins with
exactly these and they are found in caches. Its messages are held beside them, for a turn whose tools or
instructions differ: then the prompt is rendered anew. All is in the memory of one conductor, within a bound
and for a time; what is gone is said to be gone.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

from base.clock import Clock
from base.errors import invalid
from conductor.api.chat_template import ChatMessage

MAX_HELD_BYTES = 64 << 20
MAX_TENANT_BYTES = 16 << 20
LEAST_BYTES = 4_096
"""Bytes that each response is charged with besides: so few are held that room is made for any at once."""
HELD_S = 3_600.0


@dataclass(frozen=True)
class HeldResponse:
    """A conversation up to and with one answer."""

    token_ids: array[int]
    """Prompt and answer, without the token that ended it."""
    messages: tuple[ChatMessage, ...]
    setting: bytes
    """Equal where a new turn goes on from the tokens: a digest of instructions, tools and variables."""

    num_bytes: int = field(init=False)
    """Bytes that it is charged with, counted as it is made: each value of its calls is looked at."""

    def __post_init__(self) -> None:
        num_bytes = sys.getsizeof(self.token_ids) + sum(map(_turn_bytes, self.messages)) + LEAST_BYTES
        object.__setattr__(self, "num_bytes", num_bytes)


def _turn_bytes(turn: ChatMessage) -> int:
    texts = (turn.content, turn.name, turn.call_id, turn.reasoning)
    calls = (_value_bytes([call.call_id, call.name, call.arguments]) for call in turn.calls)
    return sum(map(sys.getsizeof, texts)) + sum(calls) + 512


def _value_bytes(value: Any) -> int:
    """Return the memory of a value of JSON."""
    match value:
        case dict():
            inner = sum(sys.getsizeof(key) + _value_bytes(item) for key, item in value.items())
        case list():
            inner = sum(map(_value_bytes, value))
        case _:
            inner = 0
    return sys.getsizeof(value) + inner


class HeldResponses:
    """The responses of one conductor. Owned by the event loop."""

    def __init__(
        self, clock: Clock, max_bytes: int = MAX_HELD_BYTES, max_tenant_bytes: int = MAX_TENANT_BYTES
    ) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._entries: OrderedDict[tuple[str, str], tuple[HeldResponse, float]] = OrderedDict()
        """Each response, and until when it is held; oldest first."""
        self._ids_of: dict[str, OrderedDict[str, None]] = {}
        """The responses of each tenant, oldest first."""
        self._tenant_bytes: Counter[str] = Counter()
        self.num_bytes = 0

    def find(self, tenant: str, response_id: str) -> HeldResponse:
        """Return a response; raises InvalidRequestError for one that is not held, or another tenant's."""
        self._forget_old()
        entry = self._entries.get((tenant, response_id))
        if entry is None:
            raise invalid(
                "previous_response_id",
                f"{response_id[:100]!r} is not held here: it was not stored, is older "
                f"than {HELD_S / 60:g} minutes or made room for others; send the whole conversation as input",
            )
        return entry[0]

    def hold(self, tenant: str, response_id: str, response: HeldResponse) -> None:
        """Hold a response for a time; the oldest of this tenant, then of all, make room."""
        num_bytes = response.num_bytes
        if num_bytes > self._max_tenant_bytes:
            return
        self._forget_old()
        if (tenant, response_id) in self._entries:
            self._forget((tenant, response_id))
        while self._tenant_bytes[tenant] + num_bytes > self._max_tenant_bytes:
            self._forget((tenant, next(iter(self._ids_of[tenant]))))
        while self.num_bytes + num_bytes > self._max_bytes:
            self._forget(next(iter(self._entries)))
        self._entries[tenant, response_id] = response, self._clock.now_s() + HELD_S
        self._ids_of.setdefault(tenant, OrderedDict())[response_id] = None
        self.num_bytes += num_bytes
        self._tenant_bytes[tenant] += num_bytes

    def check(self) -> None:
        """Assert that the counts are those of what is held."""
        counts: Counter[str] = Counter()
        for (tenant, _), (response, _) in self._entries.items():
            counts[tenant] += response.num_bytes
        assert {**counts} == {**self._tenant_bytes}
        assert {(tenant, each) for tenant, ids in self._ids_of.items() for each in ids} == {*self._entries}
        assert sum(counts.values()) == self.num_bytes <= self._max_bytes

    def _forget_old(self) -> None:
        now_s = self._clock.now_s()
        while self._entries:
            key, (_, until_s) = next(iter(self._entries.items()))
            if until_s > now_s:
                return
            self._forget(key)

    def _forget(self, key: tuple[str, str]) -> None:
        (tenant, response_id), (response, _) = key, self._entries.pop(key)
        self.num_bytes -= response.num_bytes
        self._tenant_bytes[tenant] -= response.num_bytes
        del self._ids_of[tenant][response_id]
        if not self._ids_of[tenant]:
            del self._tenant_bytes[tenant], self._ids_of[tenant]
