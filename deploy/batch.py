"""`conductor batch`: a file of requests in OpenAI's batch format, asked of a running cluster.

A line of the input, and of the output:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": ..., "custom_id": "a", "response": {"status_code": 200, "body": {...}, ...}, "error": null}

An answer is written when it is there, one line in one write. A run that was stopped goes on where it was:
what the output has is not asked again. A refusal for now (429, 503) is asked again when it says; any other
goes to the file of errors, and a further run asks it anew.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from base.errors import ConfigError
from base.option_values import require_writable
from deploy.api_client import Answer, ApiError, post, require_server
from deploy.options import ADDRESS, Address

MAX_LINE_BYTES = 16 << 20
MAX_TRIES = 8
LONGEST_WAIT_S = 60.0
FOR_NOW = (429, 503)


class BatchLine(NamedTuple):
    """One request of a batch."""

    custom_id: str
    url: str
    body: bytes


def main(
    requests: Annotated[Path, typer.Argument(help="Requests: JSON lines in OpenAI's batch format")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Answers; a run that was stopped goes on")],
    errors: Annotated[Path | None, typer.Option(help="Refusals; else the output's name and .errors")] = None,
    address: Address = ADDRESS,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests at a time")] = 32,
) -> None:
    """Ask every request of a file, and write the answers to another."""
    errors = errors or output.with_name(f"{output.name}.errors")
    for option, path in (("--output", output), ("--errors", errors)):
        require_writable(option, path)
    done = answered_ids(output)
    total = sum(1 for _ in lines_of(requests))
    require_server(address)  # one that goes away later is waited for
    stop = threading.Event()
    with (
        output.open("ab") as answers,
        errors.open("wb") as refusals,
        ThreadPoolExecutor(concurrency, "batch") as pool,
        _bar() as bar,
    ):
        task = bar.add_task("batch", total=total, completed=len(done))
        left = (line for line in lines_of(requests) if line.custom_id not in done)
        num_refused = 0
        try:
            for line, answer in _answers(pool, left, address, concurrency, stop):
                is_good = answer.status < 400
                num_refused += not is_good
                _write(answers if is_good else refusals, line, answer)
                bar.advance(task)
        except BaseException as error:
            stop.set()
            pool.shutdown(cancel_futures=True)
            if isinstance(error, KeyboardInterrupt):
                raise typer.Exit(130) from None
            raise
    if num_refused:
        Console(stderr=True).print(f"{num_refused} requests were refused: {errors}", soft_wrap=True)
        raise typer.Exit(1)
    errors.unlink()


def lines_of(path: Path) -> Iterator[BatchLine]:
    """Yield the requests of a file; raises ConfigError that names the line at fault."""
    seen: set[str] = set()
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from error
    with file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if not raw.strip():
                continue
            line = _parsed(raw, f"{path}:{number}")
            if line.custom_id in seen:
                raise ConfigError(f"{path}:{number}: custom_id {line.custom_id!r} is there twice")
            seen.add(line.custom_id)
            yield line


def _parsed(raw: bytes, where: str) -> BatchLine:
    if len(raw) > MAX_LINE_BYTES:
        raise ConfigError(f"{where}: more than {MAX_LINE_BYTES} bytes")
    try:
        table = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: no JSON: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: a JSON object is wanted")
    custom_id, url, body = table.get("custom_id"), table.get("url"), table.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ConfigError(f"{where}: custom_id: a text is wanted")
    if table.get("method", "POST") != "POST":
        raise ConfigError(f"{where}: method: POST is wanted")
    if not isinstance(url, str) or not url.startswith("/v1/") or not url.isascii() or " " in url:
        raise ConfigError(f"{where}: url: a path such as /v1/chat/completions is wanted")
    if not isinstance(body, dict):
        raise ConfigError(f"{where}: body: a JSON object is wanted")
    if body.get("stream"):
        raise ConfigError(f"{where}: body.stream: a batch has whole answers; leave it out")
    return BatchLine(custom_id, url, json.dumps(body).encode())


def answered_ids(output: Path) -> set[str]:
    """Return the requests that an output has answers to, and cut off a line that was not written whole."""
    if not output.exists():
        return set()
    found: set[str] = set()
    whole = 0
    with output.open("rb+") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            try:
                found.add(json.loads(raw)["custom_id"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{output}: byte {whole}: no answer of a batch: {error}") from error
            whole += len(raw)
        file.truncate(whole)
    return found


def _answers(
    pool: ThreadPoolExecutor, left: Iterator[BatchLine], address: str, concurrency: int, stop: threading.Event
) -> Iterator[tuple[BatchLine, Answer]]:
    """Yield answers as they come, with so many requests under way."""
    under_way: dict[Future[Answer], BatchLine] = {}
    is_over = False
    while under_way or not is_over:
        while not is_over and len(under_way) < concurrency:
            line = next(left, None)
            if line is None:
                is_over = True
            else:
                under_way[pool.submit(_asked, address, line, stop)] = line
        done, _ = wait(under_way, return_when=FIRST_COMPLETED)
        for future in done:
            yield under_way.pop(future), future.result()


def _asked(address: str, line: BatchLine, stop: threading.Event) -> Answer:
    """Ask until there is an answer that another try would not change; raises ApiError for none."""
    tries = 0
    while True:
        tries += 1
        try:
            answer = post(address, line.url, line.body)
        except ApiError:
            if tries == MAX_TRIES or stop.is_set():
                raise
            wait_s = min(LONGEST_WAIT_S, 2.0 ** (tries - 1))
        else:
            if answer.status not in FOR_NOW or tries == MAX_TRIES or stop.is_set():
                return answer
            wait_s = min(LONGEST_WAIT_S, 1.0 if answer.retry_after_s is None else answer.retry_after_s)
        stop.wait(wait_s)


def _write(file: BinaryIO, line: BatchLine, answer: Answer) -> None:
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": _body(answer)}
    error = None if answer.status < 400 else _error(response["body"])
    entry = {"id": f"batch_req_{answer.request_id}", "custom_id": line.custom_id}
    file.write(json.dumps({**entry, "response": response, "error": error}).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())


def _body(answer: Answer) -> Any:
    try:
        return json.loads(answer.body)
    except ValueError:
        return answer.body.decode(errors="replace")


def _error(body: Any) -> dict[str, Any]:
    error = body.get("error") if isinstance(body, dict) else None
    found = error if isinstance(error, dict) else {}
    return {"code": found.get("code") or found.get("type"), "message": found.get("message", str(body))}


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
