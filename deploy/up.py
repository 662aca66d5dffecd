"""`conductor up`: start a cluster, show an answer, serve until a signal.

The first Ctrl-C or SIGTERM drains; the second ends everything at once. Either way nothing is left running.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.markup import escape

from base.clock import Clock, SystemClock
from base.config import ClusterConfig
from base.errors import ConfigError, errors_in
from deploy.api_client import ApiError, ChatStream, url
from deploy.change import unless
from deploy.cluster import Cluster, Endpoints, Programs, RayGoneError
from deploy.clusters import Running, claimed, described, running
from deploy.config_file import read_cluster_config
from deploy.control import controlled
from deploy.keeper import DRAIN_S, INTERRUPTED, keep
from deploy.plan import require_known, require_model_there
from deploy.ports import require_free, wanted_ports
from deploy.progress import Progress

ANSWER_TOKENS = 256
"""The longest answer to `--prompt`."""

UNREAD = 128 + signal.SIGPIPE
"""Exit status of a command whose standard output nobody reads any more, as of one that the signal ended."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Wishes of who typed `conductor up`, besides serving."""

    prompt: str = ""
    leave: bool = False
    """End after the start, and after the answer if there is a prompt."""
    machine: bool = False
    """Print JSON."""


def main(
    config: Annotated[
        Path | None, typer.Option("-c", "--config", help="cluster.yaml; default: all defaults")
    ] = None,
    prompt: Annotated[str, typer.Option(help="Ask this once the cluster is up; print the answer")] = "",
    exit_: Annotated[bool, typer.Option("--exit", help="End after the start (and the answer)")] = False,
    http_port: Annotated[int | None, typer.Option(help="Instead of server.http_port; 0: a free one")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object a line")] = False,
    trace_out: Annotated[
        Path | None, typer.Option(help="A folder for nodes' timelines, for Chrome and Perfetto")
    ] = None,
) -> None:
    """Start a cluster, serve, drain on Ctrl-C."""
    clock = SystemClock()
    try:
        cluster_config = read_cluster_config(config)
        if http_port is not None:
            server = dataclasses.replace(cluster_config.server, http_port=http_port)
            cluster_config = dataclasses.replace(cluster_config, server=server)
        if trace_out is not None:
            cluster_config = dataclasses.replace(cluster_config, trace_out=str(trace_out.absolute()))
    except (ConfigError, ValueError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error
    raise typer.Exit(run(cluster_config, UpOptions(prompt, exit_, json_), Programs(), clock, config))


def run(
    config: ClusterConfig, options: UpOptions, programs: Programs, clock: Clock, file: Path | None = None
) -> int:
    """Run a cluster, whose `config` was read from `file`, to its end; return the exit status."""
    identity = described(config, file, tuple(wanted_ports(config)))

    def drive(outlive: Callable[[], None]) -> int:
        progress = Progress(clock)
        up = _Up(options, progress, clock, identity)
        return asyncio.run(up.run(Cluster(config, identity, programs, progress, up.watch_signals, outlive)))

    try:
        require_model_there(config.model)
        require_known(config)
        require_free(config, running(config.cache_dir))
        with claimed(identity):
            return keep(drive, Path(identity.log_folder), clock)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1


def _own_stdout() -> TextIO:
    """Return standard output, and send whatever else is written there to standard error.

    Standard output is the answer's alone, and Ray, its libraries included, prints there.
    """
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return own


class _Up:
    """One run of the command, from its start to its exit status."""

    def __init__(self, options: UpOptions, progress: Progress, clock: Clock, identity: Running) -> None:
        self._stdout = _own_stdout()
        self._identity = identity
        self._options = options
        self._progress = progress
        self._clock = clock
        self._started_at_s = clock.now_s()
        self._signalled = asyncio.Event()
        self._signalled_again = asyncio.Event()
        self._is_serving = False

    def watch_signals(self) -> None:
        """Take SIGINT and SIGTERM, from whoever has them."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    async def run(self, cluster: Cluster) -> int:
        self.watch_signals()
        try:
            status = await unless(self._signalled, self._serve(cluster))
        except* RayGoneError as group:
            # At once, as Ray's own code does: what a Ray that is half gone is asked may end what serves.
            self._progress.say(escape(str(next(errors_in(group)))))
            sys.stderr.flush()
            os._exit(1)
        except* (ConfigError, RuntimeError, ApiError) as group:
            for error in errors_in(group):
                print(error, file=sys.stderr)
            status = 1
        except* BrokenPipeError:
            status = UNREAD
        finally:
            await self._stop(cluster)
        # A signal is the ordinary end of serving, but not of anything that was asked for.
        return status if status is not None else 0 if self._is_serving else INTERRUPTED

    def _on_signal(self) -> None:
        (self._signalled_again if self._signalled.is_set() else self._signalled).set()

    async def _stop(self, cluster: Cluster) -> None:
        with self._progress.stage("stop") as note:
            note("draining; Ctrl-C again to stop at once")
            await unless(self._signalled_again, cluster.drain(DRAIN_S))
            if self._signalled_again.is_set():
                await cluster.drain(0.0)
            await cluster.stop()
            note("nothing is left running")

    async def _serve(self, cluster: Cluster) -> int:
        endpoints = await cluster.start()
        startup_s = self._clock.now_s() - self._started_at_s
        if self._options.prompt:
            await self._answer(endpoints)
        elif self._options.machine:
            self._print_json(endpoints, startup_s=round(startup_s, 2))
        if self._options.leave:
            return 0
        self._is_serving = True
        self._progress.say(
            f"{endpoints.model} is served at {url(endpoints.http_address)}/v1 and, by gRPC, at "
            f"{endpoints.grpc_address}\nlogs are in {cluster.log_folder}; Ctrl-C drains and ends"
        )
        async with controlled(cluster.pools, self._identity):
            async for event in cluster.events():
                details = " ".join(
                    f"{key}={value}" for key, value in event.items() if key not in ("event", "name")
                )
                self._progress.say(escape(f"{event['name']}: {event['event']} {details}"))
        return 1

    def _print(self, text: str) -> None:
        self._stdout.write(text)
        self._stdout.flush()

    def _print_json(self, endpoints: Endpoints, **more: Any) -> None:
        self._print(json.dumps({**dataclasses.asdict(endpoints), **more}) + "\n")

    async def _answer(self, endpoints: Endpoints) -> None:
        """Ask the prompt over HTTP; show the answer as it comes."""
        messages = [{"role": "user", "content": self._options.prompt}]
        asked = (endpoints.http_address, endpoints.model, messages)
        with contextlib.closing(ChatStream(*asked, max_tokens=ANSWER_TOKENS, temperature=0)) as stream:
            first_token_s, text = await asyncio.to_thread(self._print_pieces, stream)
        if self._options.machine:
            self._print_json(endpoints, answer=text, first_token_s=round(first_token_s, 2))
        self._progress.say(f"[green]✓[/green] the first token came {first_token_s:.1f} s after the command")

    def _print_pieces(self, stream: ChatStream) -> tuple[float, str]:
        text, first_token_s = "", 0.0
        show = (lambda piece: None) if self._options.machine else self._print
        for piece in stream.pieces():
            if piece and not text:
                first_token_s = self._clock.now_s() - self._started_at_s
            text += piece
            show(piece)
        show("\n")
        if not text:
            raise ApiError("the answer is empty")
        return first_token_s, text
