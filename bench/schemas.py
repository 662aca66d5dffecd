"""`python -m bench.schemas SCHEMAS.jsonl`: answers of many schemas from a live cluster, and nodes that die.

SmolLM2 on one prefill and two decode nodes of this machine is asked for JSON of each schema, greedily, whole,
streamed, and for every third again while the decode node with most of the requests is killed in the middle of
them. An answer is valid by its schema, or was cut by length and says so; streams, and answers of which a
node died, are those of the undisturbed call to the letter. A line of the file is an object with `name` and
`schema`, as JSONSchemaBench's (github.com/guidance-ai/jsonschemabench) are.

With `--model small` a narrow model that nobody trained answers, whatever it draws, but for a bias to marks
that end things: all that makes sense of its answers is the grammar, and it takes a hundredth of the time.

    python -m bench.schemas schemas.jsonl --json bench/results/schemas.json
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from base.config import ClusterConfig, EngineConfig, PoolConfig, ServerConfig
from bench.about_run import about_run, write_result
from bench.faults.asking import SMALL_MODEL
from bench.faults.small_model import small_model
from bench.local_cluster import LocalCluster, local_cluster, smollm2
from deploy.plan import LocalModel

SHOWN_CHARS = 120
"""Characters of a schema that the prompt shows: a small model copes with no more."""
MARKS = ('"', '",', '":', '"}', "}", "]", "},", "}}", '"]', ",")
MARK_BIAS = 20.0
TOKENIZER_TOKENS = 49_152
"""SmolLM2's."""
PIECES_BEFORE_KILL = 4
TIMEOUT_S = 600.0

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one call."""

    status: int
    text: str
    """The answer, or what was wrong with the call."""
    finish_reason: str = ""


class Asking:
    """Calls of one cluster."""

    def __init__(self, cluster: LocalCluster, model: str, max_tokens: int) -> None:
        self._cluster = cluster
        self._model = model
        self._max_tokens = max_tokens
        self._drawn: Json = {"temperature": 0}
        if model == SMALL_MODEL:
            tokens = {
                token for mark in MARKS for token in self._post("/tokenize", {"prompt": mark})["tokens"]
            }
            self._drawn = {"seed": 7, "logit_bias": dict.fromkeys(map(str, tokens), MARK_BIAS)}

    def ask(self, schema: Any, is_stream: bool, on_piece: Callable[[], None] = lambda: None) -> Answer:
        """Ask for JSON of a schema; `on_piece` is called for each event of a stream."""
        with closing(self._connection()) as connection:
            body = json.dumps(self._body(schema) | {"stream": is_stream}).encode()
            connection.request(
                "POST",
                "/v1/chat/completions",
                body,
                {"content-type": "application/json", "connection": "close"},
            )
            reply = connection.getresponse()
            if reply.status != 200:
                return Answer(reply.status, json.loads(reply.read())["error"]["message"])
            if is_stream:
                return _joined(_events(reply, on_piece))
            choice = json.loads(reply.read())["choices"][0]
            return Answer(200, choice["message"]["content"], choice["finish_reason"])

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._cluster.http_port, timeout=TIMEOUT_S)

    def _post(self, path: str, body: Json) -> Json:
        with closing(self._connection()) as connection:
            connection.request("POST", path, json.dumps(body).encode(), {"content-type": "application/json"})
            answer: Json = json.loads(connection.getresponse().read())
            return answer

    def _body(self, schema: Any) -> Json:
        shown = json.dumps(schema)[:SHOWN_CHARS]
        asked = f"Write an example of JSON that is valid by this schema: {shown}"
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": asked}],
            "max_tokens": self._max_tokens,
            **self._drawn,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        }


def _events(reply: http.client.HTTPResponse, on_piece: Callable[[], None]) -> Iterator[Json]:
    for line in reply:
        if line.startswith(b"data: {"):
            on_piece()
            yield json.loads(line.removeprefix(b"data: "))


def _joined(events: Iterator[Json]) -> Answer:
    text, reason = "", ""
    for event in events:
        if "error" in event:
            return Answer(500, event["error"]["message"])
        choice = event["choices"][0]
        text += choice["delta"].get("content") or ""
        reason = choice["finish_reason"] or reason
    return Answer(200, text, reason)


def fault_of(schema: Any, answer: Answer) -> str:
    """Return what is wrong with an answer; empty: it is valid, or cut by length."""
    if answer.finish_reason == "length":
        return ""
    try:
        value = json.loads(answer.text)
    except ValueError as error:
        return f"no JSON: {error}"
    validator = validator_for(schema, default=Draft202012Validator)(schema)
    return next((error.message[:200] for error in validator.iter_errors(value)), "")


class Killer:
    """Kills the busier decode node once all of a group's streams are in the middle of their answers."""

    def __init__(self, cluster: LocalCluster, size: int) -> None:
        self._cluster = cluster
        self._waiting = threading.Semaphore(0)
        self._size = size
        self.num_hit = 0
        """Requests that were on the node."""

    def watched(self, ask: Callable[[Callable[[], None]], Answer]) -> Answer:
        """Run a call, and count it in once it has some pieces, or is over."""
        pieces = 0

        def on_piece() -> None:
            nonlocal pieces
            pieces += 1
            if pieces == PIECES_BEFORE_KILL:
                self._waiting.release()

        answer = ask(on_piece)
        if pieces < PIECES_BEFORE_KILL:
            self._waiting.release()
        return answer

    def kill(self) -> None:
        """Wait for all calls, and kill."""
        for _ in range(self._size):
            self._waiting.acquire()
        nodes = [node for node in self._cluster.status()["nodes"] if "decode" in node["roles"]]
        node = max(nodes, key=lambda found: found["requests"])
        self.num_hit = node["requests"]
        pid = self._cluster.processes[node["id"]].pid()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)


def killed(
    cluster: LocalCluster, asking: Asking, schemas: list[Any], pool: ThreadPoolExecutor, at_once: int
) -> tuple[list[Answer], int, int]:
    """Return the streamed answers, the kills, and how many requests were on the nodes that died."""
    answers: list[Answer] = []
    kills = num_hit = 0
    for begin in range(0, len(schemas), at_once):
        group = schemas[begin : begin + at_once]
        killer = Killer(cluster, len(group))
        calls = [pool.submit(killer.watched, partial(asking.ask, item, True)) for item in group]
        killer.kill()
        answers += [call.result() for call in calls]
        kills, num_hit = kills + 1, num_hit + killer.num_hit
        cluster.wait_nodes(3)
    return answers, kills, num_hit


def measured(asking: Asking, cluster: LocalCluster, rows: list[Json], at_once: int) -> Json:
    schemas = [row["schema"] for row in rows]
    with ThreadPoolExecutor(at_once) as pool:
        whole = list(pool.map(lambda schema: asking.ask(schema, False), schemas))
        taken = [at for at, answer in enumerate(whole) if answer.status == 200]
        streams = list(pool.map(lambda at: asking.ask(schemas[at], True), taken))
        hurt = taken[::3]
        after, kills, num_hit = killed(cluster, asking, [schemas[at] for at in hurt], pool, at_once)
    faults = {rows[at]["name"]: fault for at in taken if (fault := fault_of(schemas[at], whole[at]))}
    return {
        "schemas": len(rows),
        "refused": {
            rows[at]["name"]: whole[at].text[:200] for at in range(len(rows)) if at not in set(taken)
        },
        "num_refused": len(rows) - len(taken),
        "refused_statuses": sorted({answer.status for answer in whole if answer.status != 200}),
        "answered": len(taken),
        "valid": sum(whole[at].finish_reason == "stop" for at in taken) - len(faults),
        "cut_by_length": sum(whole[at].finish_reason == "length" for at in taken),
        "num_invalid": len(faults),
        "invalid": faults,
        "streams_different": sum(stream != whole[at] for at, stream in zip(taken, streams, strict=True)),
        "hurt": len(hurt),
        "kills": kills,
        "requests_on_killed_nodes": num_hit,
        "hurt_different": sum(answer != whole[at] for at, answer in zip(hurt, after, strict=True)),
        "hurt_invalid": sum(
            answer.status != 200 or bool(fault_of(schemas[at], answer))
            for at, answer in zip(hurt, after, strict=True)
        ),
    }


def _model(name: str, folder: Path) -> LocalModel:
    (folder / "run").mkdir()
    if name == "small":
        return small_model(folder / "model", TOKENIZER_TOKENS)
    return smollm2()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--model", choices=("smollm2", SMALL_MODEL), default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--every", type=int, default=1, help="one of so many")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.schemas.read_text().splitlines()][:: options.every]
    engine = EngineConfig(block_size=32, kv_cache_gib=0.75, chunk_tokens=256, threads=1)
    config = ClusterConfig(
        server=ServerConfig(http_port=0, grpc_port=0),
        prefill=PoolConfig(nodes=1, engine=engine),
        decode=PoolConfig(nodes=2, engine=engine),
    )
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="schemas-") as folder,
        local_cluster(config, _model(options.model, Path(folder)), Path(folder) / "run") as cluster,
    ):
        asking = Asking(cluster, options.model, options.max_tokens)
        found = measured(asking, cluster, rows, options.at_once)
    report = {
        **found,
        "model": options.model,
        "max_tokens": options.max_tokens,
        "took_s": round(time.monotonic() - began_s, 1),
        "about": about_run("llguidance", "jsonschema", "torch"),
    }
    print(json.dumps(report, indent=1))
    write_result(options.json, report)


if __name__ == "__main__":
    main()
