"""Decisions and their outcomes as JSON lines: one form for writing a file and for reading it again.

A file begins with a `conductor` line, which holds what all decisions in it share: the
profile, the scheduler's settings, the model. Then come `decision` and `outcome` lines as
they happen (docs/reference/decision-log.md lists the fields). Every number is written so that it reads
back as itself, so a decision read from a file can be made again to the bit.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from base.block_hash import BlockHash
from base.request import NodeId, RequestId, Slo, finite_or_none
from base.tables import from_table
from conductor.placing.decisions import Actual, Decision, NodeSeen, ViewSeen
from conductor.placing.placement import Placement, PlacementRequest, Rejection, RejectReason
from conductor.placing.profile import Profile
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings

FORMAT = 1
"""The version of the lines; a reader refuses any other."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """The profile, the settings and the model of all decisions in one file."""

    profile: Profile
    settings: SchedulerSettings
    model_id: str = ""


def shared_to(shared: Shared) -> dict[str, Any]:
    settings = dataclasses.asdict(shared.settings) | {"reject": shared.settings.reject.value}
    return {
        "kind": "conductor",
        "format": FORMAT,
        "model_id": shared.model_id,
        "profile": dataclasses.asdict(shared.profile),
        "settings": settings,
    }


def shared_from(row: dict[str, Any]) -> Shared:
    if row["format"] != FORMAT:
        raise ValueError(f"format {row['format']}, this release reads {FORMAT}")
    settings = row["settings"] | {"reject": RejectPolicy(row["settings"]["reject"])}
    profile = from_table(Profile, row["profile"], ("profile",))
    return Shared(profile, SchedulerSettings(**settings), row["model_id"])


def decision_to(made: Decision) -> dict[str, Any]:
    """Return a decision as JSON's kinds of values; infinity is null."""
    asked, seen, result = made.asked, made.seen, made.result
    row = _fields_of(result)
    if isinstance(result, Rejection):
        row["reason"] = result.reason.value
    del row["request_id"]
    return {
        "kind": "decision",
        "request_id": asked.request_id,
        "arrived_at_s": made.arrived_at_s,
        "decided_at_s": made.decided_at_s,
        "asked": _fields_of(asked)
        | {
            "chain": [bytes(key).hex() if isinstance(key, bytes) else key for key in asked.chain],
            "slo": [finite_or_none(bound_s) for bound_s in asked.slo],
            "avoid": list(asked.avoid),
        },
        "seen": seen._asdict() | {"nodes": seen.nodes and [node._asdict() for node in seen.nodes]},
        "placed" if isinstance(result, Placement) else "rejected": row,
    }


def _fields_of(value: PlacementRequest | Placement | Rejection) -> dict[str, Any]:
    """Return the fields by name, and each as it is."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def decision_from(row: dict[str, Any]) -> Decision:
    request_id = RequestId(row["request_id"])
    asked, seen = row["asked"], row["seen"]
    asked |= {"avoid": tuple(asked.get("avoid", ()))}
    slo = Slo(*(math.inf if bound is None else bound for bound in asked["slo"]))
    chain = tuple(BlockHash(bytes.fromhex(key)) if isinstance(key, str) else key for key in asked["chain"])
    nodes = seen["nodes"] and tuple(
        NodeSeen(**node | {"node_id": NodeId(node["node_id"])}) for node in seen["nodes"]
    )
    return Decision(
        PlacementRequest(**asked | {"chain": chain, "slo": slo, "request_id": request_id}),
        row["arrived_at_s"],
        row["decided_at_s"],
        ViewSeen(
            **{"running_context_tokens": 0.0} | seen | {"projected": tuple(seen["projected"]), "nodes": nodes}
        ),
        _result_from(row, request_id),
    )


def _result_from(row: dict[str, Any], request_id: RequestId) -> Placement | Rejection:
    if "placed" in row:
        return Placement(request_id=request_id, **row["placed"])
    rejected = row["rejected"]
    return Rejection(request_id=request_id, **rejected | {"reason": RejectReason(rejected["reason"])})


def outcome_to(request_id: RequestId, actual: Actual) -> dict[str, Any]:
    """Return what became of a placed attempt as JSON's kinds of values."""
    return {"kind": "outcome", "request_id": request_id, **actual._asdict()}


def item_from(row: dict[str, Any]) -> Decision | tuple[RequestId, Actual]:
    """Return what a line after the first holds: a decision, or an outcome by its request."""
    if row.pop("kind") == "decision":
        return decision_from(row)
    return RequestId(row.pop("request_id")), Actual(**row)


def line_of(row: dict[str, Any]) -> str:
    """Return the line of a file that reads back as `row`."""
    return json.dumps(row, separators=(",", ":")) + "\n"
