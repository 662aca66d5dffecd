"""How many streamed tokens one conductor process can send.

    python -m bench.frontend [--json bench/results/frontend.json]

A dispatcher that has every token ready stands behind the real server, so what is measured
is detokenising, formatting and writing. Beside it, in turns, runs the least that the same
uvicorn can do: an application that writes one constant event again and again. The client
reads raw bytes and counts events, in a process of its own. Rates depend on what else the
machine does; the ratio of the two, and the server's processor time per event, less so.

A third server is the conductor with TLS 1.3 (a P-256 certificate made by `openssl`), whose
client decrypts on the same machine.

The second table is the formatting of one event alone, against an object for each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from base.clock import SystemClock
from base.config import ServerConfig, SloConfig, TlsConfig
from base.metrics import ConductorMetrics, process_registry
from base.request import FinishReason, Request, SampledToken
from bench.about_run import write_result
from bench.local_cluster import smollm2
from conductor.api.completion import Completions, Piece
from conductor.api.openai_format import CHAT, Choice, Envelope, Shown
from conductor.api.served_model import ServedModel, load_served_model
from conductor.api.server import listening, tcp_listener
from conductor.serving.generated import Generated

TLS = "tls"
SERVERS = ("bare", "conductor", TLS)
TOKENS = 2_000
"""Number of tokens of each stream."""
ROUNDS = 5
BODY = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "go on"}],
    "stream": True,
    "max_tokens": TOKENS,
}
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1795000000,'
    b'"model":"smollm2","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)


@dataclass(frozen=True, slots=True)
class Rate:
    """One server under so many streams."""

    server: str
    streams: int
    events_per_s: float
    cpu_us_per_event: float
    """Processor time of the server's process for each event, microseconds."""


class ReadyTokens:
    """A dispatcher whose tokens all exist already; each takes one turn of the event loop."""

    is_ready = True

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._parts = [Generated((SampledToken(token_id),), None, 0) for token_id in token_ids]

    async def generate(self, request: Request) -> AsyncGenerator[Generated, None]:
        for index in range(request.stop.max_tokens):
            await asyncio.sleep(0)
            yield self._parts[index % len(self._parts)]
        yield Generated((), FinishReason.LENGTH, 0)


def served_model() -> ServedModel:
    model = smollm2()
    return load_served_model(Path(model.path), model.name)


async def serve_conductor(tls: TlsConfig) -> None:
    model = served_model()
    token_ids = model.tokenizer.encode(" a few words, as a model would say them", add_special_tokens=False)
    metrics = ConductorMetrics(process_registry(), model.name)
    completions = Completions(model, ReadyTokens(token_ids), metrics, SystemClock(), max_calls=1024)
    config = ServerConfig(http_port=0, grpc_port=0, tls=tls)
    async with listening(completions, config, SloConfig(), random.Random(0)) as ports:
        sys.stdout.write(f"{ports.http_port}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


async def serve_bare() -> None:
    async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(TOKENS):
            await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    config = uvicorn.Config(application, lifespan="off", log_level="critical", ws="none")
    listener = tcp_listener("127.0.0.1", 0, "port")
    server = uvicorn.Server(config)
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener]))
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
        server.should_exit = True


def certificate(folder: Path, *more: str) -> TlsConfig:
    """Return a certificate of its own authority, made in `folder`; `more`: of openssl's arguments."""
    cert, key = folder / "cert.pem", folder / "cert.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "30", "-subj", "/CN=bench", "-keyout", str(key), "-out", str(cert), *more]
    subprocess.run(command, check=True, capture_output=True)
    return TlsConfig(str(cert), str(key))


def unchecked() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def count_events(port: int, secured: ssl.SSLContext | None) -> int:
    """Read one stream to its end; return its events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=secured)
    body = json.dumps(BODY).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    events, tail = 0, b""
    while part := await reader.read(1 << 16):
        events += (tail + part).count(b"data: ") - tail.count(b"data: ")
        tail = part[-5:]
    writer.close()
    return events


async def measure(server: str, process: subprocess.Popen[str], port: int, streams: int) -> Rate:
    cpu_s, begin_s = cpu_seconds(process.pid), time.perf_counter()
    secured = unchecked() if server == TLS else None
    events = sum(await asyncio.gather(*(count_events(port, secured) for _ in range(streams))))
    took_s = time.perf_counter() - begin_s
    return Rate(server, streams, events / took_s, (cpu_seconds(process.pid) - cpu_s) / events * 1e6)


def cpu_seconds(pid: int) -> float:
    """Return what a process has used of the processor, from Linux's /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def started(server: str, folder: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "bench.frontend", "--serve", server, "--folder", folder]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def compare(folder: str, names: Sequence[str], streams_of: Sequence[int]) -> list[Rate]:
    """Return the median of each server at each number of streams, measured in turns."""
    servers = {name: started(name, folder) for name in names}
    try:
        rates = []
        for streams in streams_of:
            of_rounds = [
                asyncio.run(measure(name, *servers[name], streams)) for _ in range(ROUNDS) for name in servers
            ]
            for name in servers:
                own = [rate for rate in of_rounds if rate.server == name]
                rates.append(
                    Rate(
                        name,
                        streams,
                        statistics.median(rate.events_per_s for rate in own),
                        statistics.median(rate.cpu_us_per_event for rate in own),
                    )
                )
        return rates
    finally:
        for process, _ in servers.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait(10)


def format_us() -> dict[str, float]:
    """Return microseconds for the text of one event, by way of making it."""
    model = served_model()
    choice = Choice(Envelope(CHAT, "0123456789abcdef", 1795000000, model.name, model.tokenizer), 0, Shown())
    piece = Piece(" word", (SampledToken(5),), None, 0)
    choice.events(piece)
    chunk = json.loads(EVENT.removeprefix(b"data: "))
    ways: dict[str, Callable[[], object]] = {
        "between two strings": lambda: choice.events(piece),
        "json.dumps of a dictionary": lambda: f"data: {json.dumps(as_dictionary(chunk))}\n\n",
    }
    return {name: min(_timed(way) for _ in range(ROUNDS)) for name, way in ways.items()}


def as_dictionary(chunk: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}
    return {**chunk, "choices": [choice]}


def _timed(way: Callable[[], object], count: int = 20_000) -> float:
    begin_s = time.perf_counter()
    for _ in range(count):
        way()
    return (time.perf_counter() - begin_s) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.frontend", description=__doc__)
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=SERVERS)
    parser.add_argument("--streams", nargs="+", type=int, default=(1, 16, 64))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.serve == "bare":
        asyncio.run(serve_bare())
        return
    if arguments.serve:
        # As conductor/__main__.py does.
        run = uvloop.run if arguments.serve == TLS else asyncio.run
        run(serve_conductor(certificate(arguments.folder) if arguments.serve == TLS else TlsConfig()))
        return
    with tempfile.TemporaryDirectory() as folder:
        rates = compare(folder, arguments.servers, arguments.streams)
    formats = format_us()
    print(f"{'server':<12}{'streams':>8}{'events/s':>12}{'cpu us/event':>14}")
    for rate in rates:
        print(f"{rate.server:<12}{rate.streams:>8}{rate.events_per_s:>12,.0f}{rate.cpu_us_per_event:>14.1f}")
    for name, us in formats.items():
        print(f"{name}: {us:.2f} us")
    machine = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    result = {"machine": machine, "rates": [asdict(rate) for rate in rates], "format_us": formats}
    write_result(arguments.json, result)


if __name__ == "__main__":
    main()
