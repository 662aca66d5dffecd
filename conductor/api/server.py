"""The listeners of the conductor, from their start to the end of a drain.

    start   bind the ports, serve
    drain   refuse new calls (health says so), wait for those in progress, at most drain_s
    stop    close the listeners; what is still in progress is cancelled

Nodes' listener stays open through the drain, because without their streams no call in progress
could end.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from base.arrivals import OpenConnections, TlsListener, num_allowed
from base.clock import Clock
from base.config import NodesConfig, ServerConfig, SloConfig, TlsConfig
from base.errors import ConfigError
from base.link import End, listen
from base.logs import event
from base.request import Slo
from base.rpc import Health, Port, start_server
from base.tls import Certificates
from base.together import beside
from conductor.api.access import Authorizer
from conductor.api.completion import Completions
from conductor.api.http_api import HttpApi
from conductor.api.http_connection import SHARE_OF_DESCRIPTORS, BoundedConnection
from conductor.api.keys import KeyRing
from conductor.api.open_inference import OpenInferenceService
from conductor.api.service import InferenceService

log = logging.getLogger(__name__)

DRAIN_S = 30.0
STOP_S = 1.0
"""The time for connections to close after the last call was answered or given up."""
BACKLOG = 1024
KEEP_ALIVE_S = 65
"""Longer than clients keep idle connections, so that it is they who close them."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a running conductor listens."""

    http_port: int
    grpc_port: int
    attach_port: int
    """Port that nodes attach to; 0: no nodes are listened for."""
    health: Health
    """The gRPC health, to be refreshed when `TokenGenerator.is_ready` changes."""


@asynccontextmanager
async def listening(
    completions: Completions,
    config: ServerConfig,
    slo: SloConfig,
    rng: random.Random,
    attach: Callable[[], End] | None = None,
    reports: Mapping[str, Callable[..., object]] | None = None,
    drain_s: float = DRAIN_S,
    nodes: NodesConfig | None = None,
) -> AsyncIterator[Listening]:
    """Serve clients for the length of the body, then drain and stop.

    Args:
        config: Addresses and limits; port 0 is a free one.
        slo: Bounds of requests that name none.
        rng: Draws request ids and seeds.
        attach: Returns the end of one more node's connection.
        reports: The handlers of `routes.ROUTES` that lie outside of this folder, by path.
        drain_s: Calls in progress after so long are cancelled.

    Raises ConfigError if an address cannot be bound, or certificate or keys not be read.
    """
    bounds = (slo.ttft_s, slo.tbt_s, slo.longest_gap_s)
    default_slo = Slo(*(bound_s or float("inf") for bound_s in bounds))
    max_bytes = int(config.max_body_mib * (1 << 20))
    nodes = nodes or NodesConfig()
    authorizer = _authorizer(config, completions.clock)
    services = [
        made(completions, default_slo, rng, authorizer).service()
        for made in (InferenceService, OpenInferenceService)
    ]
    with ExitStack() as listeners:
        http_socket = listeners.enter_context(tcp_listener(config.host, config.http_port, "server.http_port"))
        attach_port = await _listen_for_nodes(attach, config, nodes, listeners) if attach else 0
        secured = Certificates(config.tls, "server.tls").for_grpc() if config.tls.is_set else None
        port = Port(_address(config.host, config.grpc_port), secured)
        grpc_server, grpc_port, health = await start_server(
            services, lambda: completions.is_ready, port, max_bytes, authorizer.rpc
        )
        app = HttpApi(completions, default_slo, max_bytes, rng, reports, authorizer)
        http_server = _HttpServer(_shared_with(config.cors_origins, app), config.tls)
        try:
            async with beside() as begin:
                begin(http_server.serve(sockets=[http_socket]))
                try:
                    yield Listening(http_socket.getsockname()[1], grpc_port, attach_port, health)
                finally:
                    await _drain(completions, health, drain_s)
                    http_server.stop()
        finally:
            await grpc_server.stop(STOP_S)
            await completions.grammars.close()


async def _drain(completions: Completions, health: Health, drain_s: float) -> None:
    completions.drain()
    health.refresh()
    try:
        async with asyncio.timeout(drain_s):
            await completions.wait_idle()
    except TimeoutError:
        event(log, "drain cut short", level=logging.WARNING, drain_s=drain_s)
        completions.cut_off()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await completions.wait_idle()


def _shared_with(origins: Sequence[str], app: ASGIApp) -> ASGIApp:
    """Return `app` as pages of other `origins` may call it; a browser asks that before any key is shown."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: when to stop is for `__main__` to say. TLS: `base/arrivals.py`."""

    def __init__(self, app: object, tls: TlsConfig) -> None:
        self._arrivals = OpenConnections(num_allowed(SHARE_OF_DESCRIPTORS))
        self._secured = Certificates(tls, "server.tls").context if tls.is_set else None
        self._stopping = asyncio.Event()
        super().__init__(_http_config(app, self._arrivals))

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Renew the date of answers once a second, until `stop` (uvicorn's own looks ten times a second)."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stopping.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._secured is None:
            await super().startup(sockets)
            return
        await super().startup([])
        made = partial(
            BoundedConnection,
            arrivals=self._arrivals,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        listeners = [TlsListener(made, each, self._secured, self._arrivals) for each in sockets or ()]
        self.servers = listeners  # type: ignore[assignment]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _listen_for_nodes(
    attach: Callable[[], End], config: ServerConfig, nodes: NodesConfig, listeners: ExitStack
) -> int:
    """Return the port where nodes are listened for, as long as `listeners`."""
    secured = None
    if config.tls.is_set:
        # The conductor shows nodes the certificate that it shows clients, and trusts others.
        secured = Certificates(replace(config.tls, ca=nodes.tls.ca), "nodes.tls").context
    listener = tcp_listener(config.host, nodes.attach_port, "nodes.attach_port")
    server = await listen(attach, listener, secured)
    listeners.callback(server.close)
    port: int = listener.getsockname()[1]
    return port


def _authorizer(config: ServerConfig, clock: Clock) -> Authorizer:
    keys = KeyRing(Path(config.keys_file).expanduser(), clock) if config.keys_file else None
    return Authorizer(keys, config.open_metrics, config.critical_tenants)


def _http_config(app: object, arrivals: OpenConnections) -> uvicorn.Config:
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http=partial(BoundedConnection, arrivals=arrivals),  # type: ignore[arg-type]
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(STOP_S),
    )
    config.load()
    return config


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tcp_listener(host: str, port: int, key: str) -> socket.socket:
    """Return a socket that queues connections before it is served; raises ConfigError, naming `key`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named. With it, each
    # answer's body waits 40 ms for the acknowledgement of its head.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{key}: cannot listen on {_address(host, port)}: {error}") from error
    return listener
