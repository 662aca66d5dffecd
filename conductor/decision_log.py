"""Decisions and their outcomes as JSON lines: one form for a file and for reading it again.

A file begins with a `conductor` line, which holds what all decisions in it share: the
profile, the scheduler's settings, the model. Then come `decision` and `outcome` lines as
they happen (docs/decisions.md lists the fields). Every number is written so that it reads
back as itself, so a decision read from a file can be made again to the bit.

A file is full at `max_bytes`. It is then renamed to PATH.1, in place of the one before, and a
new one begins: a log takes twice `max_bytes` at most, whatever happens. Lines are written by
the event loop into the page cache, some 5 us each; a disk that refuses them ends the log,
with one line in the conductor's own log, and never a request.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from base.block_hash import BlockHash
from base.config import from_table
from base.errors import ConfigError
from base.logs import event
from base.private import private_file
from base.request import NodeId, RequestId, Slo
from conductor.decisions import Actual, Decision, NodeSeen, ViewSeen
from conductor.placement import Placement, PlacementRequest, Rejection, RejectReason
from conductor.profile import Profile
from conductor.scheduler_settings import RejectPolicy, SchedulerSettings

log = logging.getLogger(__name__)

FORMAT = 1
"""Of the lines; a reader refuses any other."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """What all decisions of one file were made with."""

    profile: Profile
    settings: SchedulerSettings
    model_id: str = ""


class DecisionLog:
    """Writes one file. Owned by the event loop."""

    def __init__(self, path: Path, shared: Shared, max_bytes: int) -> None:
        """Begin a new file; one that is there from before becomes PATH.1.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._path = path
        self._first_line = _line(shared_to(shared))
        self._max_bytes = max_bytes
        self._file: TextIO | None = None
        try:
            self._begin()
        except OSError as error:
            raise ConfigError(f"scheduler.decision_log: {error}") from error

    def decision(self, made: Decision) -> None:
        self._write(decision_to(made))

    def outcome(self, request_id: RequestId, actual: Actual) -> None:
        self._write({"kind": "outcome", "request_id": request_id, **actual._asdict()})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self) -> None:
        self.close()
        if self._path.exists():
            os.replace(self._path, f"{self._path}.1")
        # a line at a time: whoever follows the file sees whole decisions
        self._file = private_file(self._path, "w", buffering=1)
        self._num_bytes = self._file.write(self._first_line)

    def _write(self, told: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            if self._num_bytes >= self._max_bytes:
                self._begin()
            self._num_bytes += self._file.write(_line(told))
        except OSError as error:
            event(log, "decision log ended", level=logging.WARNING, path=self._path, reason=error)
            self._file = None


def read_log(path: Path) -> tuple[Shared, Iterator[Decision | tuple[RequestId, Actual]]]:
    """Return what a file's decisions share, and its decisions and outcomes in order.

    Raises:
        ConfigError: it is no decision log, or one of another format.
    """
    lines = path.read_text(encoding="ascii").splitlines()
    try:
        shared = shared_from(json.loads(lines[0]))
    except (IndexError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: no decision log: {error}") from error
    return shared, (_item_from(json.loads(line)) for line in lines[1:])


def shared_to(shared: Shared) -> dict[str, Any]:
    settings = dataclasses.asdict(shared.settings) | {"reject": shared.settings.reject.value}
    return {
        "kind": "conductor",
        "format": FORMAT,
        "model_id": shared.model_id,
        "profile": dataclasses.asdict(shared.profile),
        "settings": settings,
    }


def shared_from(told: dict[str, Any]) -> Shared:
    if told["format"] != FORMAT:
        raise ValueError(f"format {told['format']}, this release reads {FORMAT}")
    settings = told["settings"] | {"reject": RejectPolicy(told["settings"]["reject"])}
    profile = from_table(Profile, told["profile"], "profile.")
    return Shared(profile, SchedulerSettings(**settings), told["model_id"])


def decision_to(made: Decision) -> dict[str, Any]:
    """Return a decision as JSON's kinds of values; infinity is null."""
    asked, seen, result = made.asked, made.seen, made.result
    told = result._asdict()
    if isinstance(result, Rejection):
        told["reason"] = result.reason.value
    del told["request_id"]
    return {
        "kind": "decision",
        "request_id": asked.request_id,
        "arrived_at_s": made.arrived_at_s,
        "decided_at_s": made.decided_at_s,
        "asked": asked._asdict()
        | {
            "chain": [bytes(key).hex() if isinstance(key, bytes) else key for key in asked.chain],
            "slo": [_or_none(asked.slo.ttft_slo_s), _or_none(asked.slo.tbt_slo_s)],
            "avoid": list(asked.avoid),
        },
        "seen": seen._asdict() | {"nodes": seen.nodes and [node._asdict() for node in seen.nodes]},
        "placed" if isinstance(result, Placement) else "rejected": told,
    }


def decision_from(told: dict[str, Any]) -> Decision:
    request_id = RequestId(told["request_id"])
    asked, seen = told["asked"], told["seen"]
    asked |= {"avoid": tuple(asked.get("avoid", ()))}
    slo = Slo(*(math.inf if bound is None else bound for bound in asked["slo"]))
    chain = tuple(BlockHash(bytes.fromhex(key)) if isinstance(key, str) else key for key in asked["chain"])
    nodes = seen["nodes"] and tuple(
        NodeSeen(**node | {"node_id": NodeId(node["node_id"])}) for node in seen["nodes"]
    )
    return Decision(
        PlacementRequest(**asked | {"chain": chain, "slo": slo, "request_id": request_id}),
        told["arrived_at_s"],
        told["decided_at_s"],
        ViewSeen(
            **{"running_context_tokens": 0.0} | seen | {"projected": tuple(seen["projected"]), "nodes": nodes}
        ),
        _result_from(told, request_id),
    )


def _result_from(told: dict[str, Any], request_id: RequestId) -> Placement | Rejection:
    if "placed" in told:
        return Placement(request_id=request_id, **told["placed"])
    rejected = told["rejected"]
    return Rejection(request_id=request_id, **rejected | {"reason": RejectReason(rejected["reason"])})


def _item_from(told: dict[str, Any]) -> Decision | tuple[RequestId, Actual]:
    if told.pop("kind") == "decision":
        return decision_from(told)
    return RequestId(told.pop("request_id")), Actual(**told)


def _or_none(bound_s: float) -> float | None:
    return None if bound_s == math.inf else bound_s


def _line(told: dict[str, Any]) -> str:
    return json.dumps(told, separators=(",", ":")) + "\n"
