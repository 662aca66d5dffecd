"""Reads the file that `serving/decision_log.py` writes: as a run, and as a trace of what was asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from base.errors import ConfigError
from base.request import RequestId
from conductor.placing.decision_lines import Shared, item_from, shared_from
from conductor.placing.decisions import Actual, Decision
from conductor.replay.trace import DEFAULT_BLOCK_SIZE, NamedBounds, TraceRequest
from conductor.replay.trace_rows import Row, TraceFile, json_object


def read_log(path: Path) -> tuple[Shared, Iterator[Decision | tuple[RequestId, Actual]]]:
    """Return what a file's decisions share, and its decisions and outcomes in order.

    Raises:
        ConfigError: it cannot be read, is no decision log, or one of another format; a line, as it comes.
    """
    lines = TraceFile(path, skip_bad=False).lines()
    try:
        shared = shared_from(json.loads(next(lines, (1, ""))[1]))
    except (ValueError, KeyError, TypeError) as error:
        reason = f"its first line has no {error}" if isinstance(error, KeyError) else error
        raise ConfigError(f"{path}: no decision log: {reason}") from error
    return shared, _items(path, lines)


def _items(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[Decision | tuple[RequestId, Actual]]:
    for number, line in lines:
        try:
            item = item_from(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}:{number}: neither a decision nor an outcome: {error!r}") from error
        yield item


def request_of(attempt_id: str) -> tuple[str, int]:
    """Return the request that an attempt is of, and its number among that request's attempts."""
    request_id, _, number = attempt_id.rpartition(".")
    return (request_id, int(number)) if request_id and number.isdecimal() else (attempt_id, 1)


def asked_in_log(file: TraceFile, block_size: int | None) -> tuple[list[TraceRequest], int]:
    """Return what was asked of a live cluster, each request once, and the block size.

    Its output is what all its attempts made. Of a request that was refused nobody knows what it would have
    been: it stands with the mean of those that were served, where it allowed so many.
    """
    asked: dict[str, Row] = {}
    outputs: dict[str, int] = {}
    size = block_size
    for number, line in file.lines():
        try:
            row = json_object(line)
            kind = row.get("kind")
            if kind == "decision":
                size = size or int(row["seen"]["block_size"])
                request_id, attempt = request_of(row["request_id"])
                if attempt == 1:
                    asked[request_id] = row
            elif kind == "outcome":
                request_id, _ = request_of(row["request_id"])
                outputs[request_id] = outputs.get(request_id, 0) + int(row["num_output_tokens"])
            elif number > 1:
                raise ValueError("neither a decision nor an outcome")
        except (KeyError, TypeError) as error:
            file.bad(number, ValueError(f"{error} is missing, or of another kind"))
        except ValueError as error:
            file.bad(number, error)
    made = [tokens for tokens in outputs.values() if tokens]
    mean = round(sum(made) / len(made)) if made else 1
    known: dict[object, int] = {}
    first_s = min((row["arrived_at_s"] for row in asked.values()), default=0.0)
    read = []
    for request_id, row in asked.items():
        question = row["asked"]
        chain = tuple([known.setdefault(key, len(known)) for key in question["chain"]])
        output = outputs.get(request_id) or min(mean, question["max_tokens"])
        arrival_s, priority = row["arrived_at_s"] - first_s, question.get("priority", 0)
        named = NamedBounds(*question.get("slo", ()))
        bounds = None if named == NamedBounds() else named
        num_tokens = question["num_tokens"]
        read.append(TraceRequest(arrival_s, num_tokens, output, chain, priority=priority, bounds=bounds))
    return read, size or DEFAULT_BLOCK_SIZE
