"""The data of the page at /ui and of `conductor top`: all that GET /v1/page/NAME answers.

    hour, day                    the history of the cluster, packed (`history.py`)
    hour.ROW, day.ROW            the same from a row on: what a page asks again and again
    week                         by a Prometheus alone; where there is one, hour and day are its too
    node.ID, node-day.ID         the history of a node
    at.SECONDS                   each node's row at a moment since 1970, of its hour or else of its day
    fullest, fullest-day         the fullest node of each row, by which budget, and what was rejected then
    now                          nodes, links and prefixes at this moment
    requests.LIST                the latest, slowest, missed or rejected ones
    request.ID                   one with all its attempts, as /v1/explain has it

What many pages ask is worked out once: an answer without a name of its own is kept for `KEPT_S`, as bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from math import inf, isfinite, isnan, nan
from typing import Any, NamedTuple

from base.clock import Clock
from base.config import SloConfig
from base.errors import UnavailableError
from base.request import NodeId
from conductor.placing.cluster_view import ClusterView
from conductor.placing.explain import LISTS, Decisions
from conductor.placing.load_order import bits_of
from conductor.serving.budgets import BUDGETS
from conductor.serving.dispatch import Dispatcher
from conductor.serving.history import HOUR_S, NODE_SERIES, NODE_STEPS_S, History, NodeTrack
from conductor.serving.membership import Membership
from conductor.serving.nodes import NodeSession
from conductor.serving.prometheus_history import SPANS, PrometheusHistory
from conductor.serving.ring import Ring
from kvstore.index import Key

KEPT_S = 0.9
MAX_LINKS = 64
MAX_PREFIXES, MAX_HOLDERS = 12, 4
MINUTE_S = 60
LEAST_RATE = 1e-3
"""Bytes or requests a second: less is shown as none."""

NODE_COLUMNS = (
    *("id", "host", "roles", "draining", "silent_s", "blocks", "held", "cached", "running", "waiting"),
    *("queued_tokens", "context_tokens", "step_rows", "step_prompt_tokens", "step_budget"),
    *("queue_s", "step_s", "placed", "pace"),
)
"""Columns of the nodes in `now`: blocks, sequences, tokens, seconds as in `NODE_SERIES`, and how many times
what the profile says its work takes.

None: not known, or not its role.
"""


class PageSettings(NamedTuple):
    """The parts of the configuration that the page shows."""

    slo: SloConfig
    trace_page: str = ""
    """The address of a trace, `TracingConfig.page`."""
    max_body_bytes: int = 8 << 20
    """The most that one call may have, and so a trace that is dropped: `ServerConfig.max_body_mib`."""
    roles_follow: bool = False
    """Whether roles follow the load: a node of either role is one node, to the page's replays."""


class PageData:
    """Answers by name. Belongs to the event loop."""

    def __init__(
        self,
        history: History,
        dispatcher: Dispatcher,
        membership: Membership,
        view: ClusterView,
        decisions: Decisions,
        settings: PageSettings,
        clock: Clock,
        prometheus: PrometheusHistory | None = None,
    ) -> None:
        """Begin. `prometheus`: where the cluster's history is drawn from; None: `history` alone."""
        self._prometheus = prometheus
        self._history, self._dispatcher, self._membership = history, dispatcher, membership
        self._decisions = decisions
        self._view, self._settings, self._clock = view, settings, clock
        self._kept: dict[str, tuple[float, bytes]] = {}
        hour, day = history.fullest
        self._answers: dict[str, Callable[[], dict[str, Any]]] = {
            "now": self._now,
            "fullest": lambda: {**self._state(), "budgets": BUDGETS, **hour.to_json()},
            "fullest-day": lambda: {**self._state(), "budgets": BUDGETS, **day.to_json()},
        } | {f"requests.{kind}": partial(self._requests, kind) for kind in LISTS}
        self._named: dict[str, Callable[[str], dict[str, Any] | None]] = {
            "hour": lambda row: self._rows(history.hour, row),
            "day": lambda row: self._rows(history.day, row),
            "node": lambda node_id: self._node(node_id, lambda track: track.hour),
            "request": self._request,
            "node-day": lambda node_id: self._node(node_id, lambda track: track.day),
            "at": self._at,
        }

    async def answer(self, name: str) -> bytes | dict[str, Any] | None:
        """Return the answer as JSON, packed or for packing; None: nothing has such a name."""
        made_at_s, body = self._kept.get(name, (-inf, b""))
        if self._clock.now_s() - made_at_s < KEPT_S:
            return body
        if make := self._answers.get(name):
            body = json.dumps(make(), separators=(",", ":"), allow_nan=False).encode()
            self._kept[name] = self._clock.now_s(), body
            return body
        kind, _, rest = name.partition(".")
        if self._prometheus is not None and kind in SPANS:
            try:
                return {**self._state(), **await self._prometheus.rows(kind)}
            except UnavailableError as error:
                if kind not in self._named:
                    raise
                return {**(self._named[kind]("") or {}), "problem": str(error)}
        named = self._named.get(kind)
        return named(rest) if named else None

    def _rows(self, ring: Ring, row: str) -> dict[str, Any] | None:
        if row and not _is_number(row):
            return None
        return {**self._state(), **ring.to_json(int(row or 0))}

    def _node(self, node_id: str, ring: Callable[[NodeTrack], Ring]) -> dict[str, Any] | None:
        track = self._history.nodes.get(NodeId(node_id))
        return None if track is None else {**self._state(), **ring(track).to_json()}

    def _at(self, moment: str) -> dict[str, Any] | None:
        """Return what each node's history says of a moment; nodes that were not there then are left out."""
        if not _is_number(moment):
            return None
        history, at_s = self._history, int(moment)
        is_of_hour = at_s >= history.now_s - HOUR_S
        step_s = NODE_STEPS_S[0 if is_of_hour else 1]
        nodes = []
        for node_id, track in history.nodes.items():
            row = (track.hour if is_of_hour else track.day).row(at_s // step_s)
            if not all(map(isnan, row)):
                host = self._view.node(node_id).info.host if self._view.is_member(node_id) else None
                nodes.append([node_id, host, *map(_known, row)])
        moment_s = at_s // step_s * step_s
        columns = ("id", "host", *NODE_SERIES)
        return {**self._state(), "moment_s": moment_s, "step_s": step_s, "columns": columns, "nodes": nodes}

    def _requests(self, kind: str) -> dict[str, Any]:
        return {**self._state(), "requests": self._decisions.recent(self._clock.now_s(), kind)}

    def _request(self, name: str) -> dict[str, Any] | None:
        found = self._decisions.explain(name)
        if found is None:
            return None
        about = {"now_s": self._clock.now_s(), "trace_page": self._settings.trace_page}
        return {**self._state(), **about, **found}

    def _state(self) -> dict[str, Any]:
        """Return what every answer begins with."""
        slo = self._settings.slo
        return {
            "at_s": self._history.now_s,
            "ready": self._dispatcher.is_ready,
            "bounds": {"ttft_s": slo.ttft_s or None, "tbt_s": slo.tbt_s or None},
            "limits": {name: _known(value) for name, value in self._history.budgets.limits._asdict().items()},
        }

    def _now(self) -> dict[str, Any]:
        now_s, view, history = self._clock.now_s(), self._view, self._history
        sessions = sorted(self._membership.sessions, key=lambda session: session.info.node_id)
        links = history.links.highest(MAX_LINKS, now_s)
        prefixes = history.prefixes.highest(MAX_PREFIXES, now_s)
        line_s = self._dispatcher.queue.line_s
        return {
            **self._state(),
            "running": self._dispatcher.num_running,
            "waiting": len(self._dispatcher.queue),
            "in_control": self._membership.in_control(),
            "lacked": history.fullest[0].counts(MINUTE_S // NODE_STEPS_S[0]),
            "max_body_bytes": self._settings.max_body_bytes,
            "roles_follow": self._settings.roles_follow,
            "columns": NODE_COLUMNS,
            "nodes": [self._row(session, now_s, line_s) for session in sessions],
            "links": [[*pair, round(rate)] for pair, rate in links if rate > LEAST_RATE],
            "prefixes": [
                [_name(key), depth, round(rate, 3), holders.bit_count(), _nodes_of(holders, view)]
                for (key, depth), rate in prefixes
                for holders in [view.index.holders(key)]
                if rate > LEAST_RATE
            ],
        }

    def _row(self, session: NodeSession, now_s: float, line_s: float) -> list[Any]:
        info, beat = session.info, session.last_heartbeat
        node = self._view.node(info.node_id)
        queue_s, step_s = self._view.load_of(info.node_id, now_s)
        roles = "+".join(sorted(role.value for role in node.info.roles))
        draining = node.is_draining
        row: list[Any] = [info.node_id, info.host, roles, draining]
        if beat is None:
            row += [None, info.num_blocks, *[None] * 9]
        else:
            cached = min(self._view.index.num_blocks(node.slot), info.num_blocks)
            row += [
                round(now_s - session.last_heartbeat_at_s, 1),
                info.num_blocks,
                beat.num_held_blocks,
                cached,
            ]
            row += [beat.num_running, beat.num_waiting, beat.num_queued_tokens, beat.num_context_tokens]
            row += [beat.num_step_rows, beat.num_step_prompt_tokens, beat.step_budget_tokens]
        terms = (term for term, seconds in (("prefill", queue_s), ("decode", step_s)) if isfinite(seconds))
        pace = max((self._view.corrections.ratio(info.node_id, term) for term in terms), default=nan)
        return [*row, _known(queue_s + line_s), _known(step_s), session.num_requests, _known(pace)]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 16


def _known(seconds: float) -> float | None:
    return round(seconds, 6) if isfinite(seconds) else None


def _nodes_of(holders: int, view: ClusterView) -> list[NodeId]:
    return [view.members[slot].info.node_id for slot in bits_of(holders, MAX_HOLDERS)]


def _name(key: Key) -> str:
    return key.hex()[:12] if isinstance(key, bytes) else str(key)
