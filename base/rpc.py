"""The gRPC server of a process, and the border where errors become statuses.

Handlers raise the errors of `base/errors.py`; what stands around every handler turns
them into a status with google.rpc details, by the table there. It is the only place that
does, and the only one that catches everything: what is no ServeError is a bug, which is
logged here and sent to nobody. It also writes a handler's stream out by itself, because
grpc leaves a generator half run when a client goes while it is written to.

Health answers from a function, so it is right at the moment it is asked; who watches
is notified by `Health.refresh`.

Pings: a peer may send one every 10 s with no call in progress. With grpc's defaults a long
decode ends in GOAWAY "too_many_pings".
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf import any_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from base.alarm import Alarm
from base.arrivals import num_allowed
from base.errors import (
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    RejectedError,
    ServeError,
    SloUnreachableError,
    retry_after_s,
    status_of,
)
from base.message_bounds import FREE_BYTES, parsed
from base.off_loop import on_body

log = logging.getLogger(__name__)

ERROR_DOMAIN = "conductor"
MAX_MESSAGE_CHARS = 1_000
"""Statuses travel in headers, which peers bound at 8 KiB."""
MAX_NOT_TAKEN_UP = 8192
"""Calls, of all connections, that wait for the event loop. Each is answered by its handler, be it only
with when to come again; grpc itself can but cancel those beyond, and would some from its own 1,000 on."""
LOOKAHEAD_BYTES = 1 << 20
"""Bytes of a message that a client may send before the server has read what came before."""
MESSAGE_TIMEOUT_S = 30.0
"""Limit for the message of a call to arrive: each that is under way holds what has come of it."""
SLOW_S = 1.0
"""Time after which a message that is under way counts as slow."""
MAX_SLOW_MESSAGES = 64
"""Slow messages of all clients. How much has come of one is not known before its end, so each is taken for
one of the greatest length."""
WRITE_TIMEOUT_S = 60.0
"""Limit for a client to take what is written to it, while its call holds all that it holds."""
MAX_WATCHES = 256
"""Streams in progress of each of gRPC's own methods, of all clients: each takes 25 kB."""
SHARE_OF_DESCRIPTORS = 0.2
"""Share of the process's descriptors for connections to this server; other listeners have the rest."""
HANDSHAKE_TIMEOUT_S = 10.0
IDLE_S = 65.0
"""Time without a call after which a connection ends; a client's library dials again at its next call."""
HEAR_S = 1.0
"""A call that is refused waits so long for the first message of its stream."""


@dataclass(frozen=True, slots=True)
class Service:
    """A servicer to be served."""

    full_name: str
    """Name in the proto file, as conductor.v1.Inference."""
    add: Callable[[grpc.aio.Server], None]
    takes_bytes: bool = False
    """Whether handlers are given each message as it came, and parse it themselves."""


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1 for all services of a process together."""

    def __init__(self, is_serving: Callable[[], bool], service_names: Sequence[str]) -> None:
        """Begin.

        Args:
            is_serving: Whether a call that came now would be served.
            service_names: What may be asked for, besides "" for the whole process.
        """
        self._is_serving = is_serving
        self._service_names = {"", *service_names}
        self._changed = asyncio.Event()

    def refresh(self) -> None:
        """Notify who watches: `is_serving` may have changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._service_names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return self._answer(request.service)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        sent = None
        while True:
            changed = self._changed
            answer = self._answer(request.service)
            if answer != sent:
                sent = answer
                yield answer
            await changed.wait()

    def _answer(self, service: str) -> health_pb2.HealthCheckResponse:
        states = health_pb2.HealthCheckResponse
        if service not in self._service_names:
            return states(status=states.SERVICE_UNKNOWN)
        return states(status=states.SERVING if self._is_serving() else states.NOT_SERVING)


@dataclass(frozen=True, slots=True)
class Port:
    """Where a server listens."""

    address: str
    """host:port; port 0 is a free one."""
    credentials: grpc.ServerCredentials | None = None
    """Credentials from `base/tls.py`; None: without TLS."""


Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Admit: TypeAlias = Callable[[str, Context], AbstractContextManager[object]]
"""Entered with a method's full name for the length of each call; raises a ServeError to refuse it."""


def admit_all(method: str, context: Context) -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def _admit_few(admit: Admit, held: Counter[str], method: str, context: Context) -> Iterator[None]:
    """Admit as `admit` does, `MAX_WATCHES` at once: a client may hold its call for ever."""
    with admit(method, context):
        if held[method] >= MAX_WATCHES:
            raise RejectedError(f"{method} has {MAX_WATCHES} calls in progress already")
        held[method] += 1
        try:
            yield
        finally:
            held[method] -= 1


async def start_server(
    services: Sequence[Service],
    is_serving: Callable[[], bool],
    port: Port,
    max_message_bytes: int,
    admit: Admit = admit_all,
) -> tuple[grpc.aio.Server, int, Health]:
    """Start a server with health and reflection; return it, its port, and its health.

    Stop it with `await server.stop(grace_s)`.

    Args:
        services: What it serves.
        is_serving: For health.
        port: Where.
        max_message_bytes: Longer messages are refused, with RESOURCE_EXHAUSTED.
        admit: Who may call what.

    Raises:
        ConfigError: an address cannot be bound.
    """
    server = grpc.aio.server(options=_options(max_message_bytes))
    names = [service.full_name for service in services]
    border: Any = _Border(admit, services)
    health = Health(is_serving, names)
    health_pb2_grpc.add_HealthServicer_to_server(health, border)
    for service in services:
        service.add(border)
    shown = [*names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
        reflection.aio.ReflectionServicer(shown), border
    )
    server.add_generic_rpc_handlers((border,))
    bound = _bind(server, port)
    await server.start()
    return server, bound, health


def _bind(server: grpc.aio.Server, port: Port) -> int:
    try:
        if port.credentials is None:
            return server.add_insecure_port(port.address)
        return server.add_secure_port(port.address, port.credentials)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {port.address}: {error}") from error


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_metadata_size", 16 << 10),
        # A ping with what arrives, to learn how much may be under way: a tenth of a short call's time. Fixed.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        # What a client has beyond these waits on its side.
        ("grpc.max_concurrent_streams", 1024),
        # Off: it counts streams that have ended and are not forgotten yet, and resets a busy server's calls.
        ("grpc.http.overload_protection", 0),
        ("grpc.server.max_pending_requests", MAX_NOT_TAKEN_UP),
        ("grpc.server.max_pending_requests_hard_limit", MAX_NOT_TAKEN_UP),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT_S * 1e3)),
        # Counted from the first packet on; who comes beyond is closed at once. None of ours: grpc hands out
        # no connection that could make room.
        ("grpc.max_allowed_incoming_connections", num_allowed(SHARE_OF_DESCRIPTORS)),
        ("grpc.max_connection_idle_ms", int(IDLE_S * 1e3)),
        # A second process on the same port is a mistake, not a share of the load.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def error_details(error: ServeError) -> list[Message]:
    """Return `error` for programs, as google.rpc messages."""
    info = error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=ERROR_DOMAIN)
    if isinstance(error, SloUnreachableError):
        info.metadata["predicted_ttft_s"] = f"{error.predicted_ttft_s:.6g}"
        info.metadata["predicted_tbt_s"] = f"{error.predicted_tbt_s:.6g}"
    details: list[Message] = [info]
    if isinstance(error, InvalidRequestError) and error.param:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.param, description=str(error)[:MAX_MESSAGE_CHARS]
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if (retry_s := retry_after_s(error)) is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(retry_s * 1e9))
        details.append(retry)
    return details


def _status(error: ServeError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes]]]:
    """Return the status, the message and the trailers that `error` becomes."""
    code = status_of(error)
    message = str(error)[:MAX_MESSAGE_CHARS]
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in error_details(error):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return code, message, (("grpc-status-details-bin", status.SerializeToString()),)


async def _end_call(context: Context, error: ServeError, is_streaming: bool) -> None:
    """End a call with `error`'s status.

    What `abort` raises is kept by the call and keeps the call, and with it all that a rejected request
    held, until the garbage collector comes by. So a stream gets its status and ends; a call with one
    answer, which would be sent one, is aborted.
    """
    code, message, trailers = _status(error)
    if not is_streaming:
        await context.abort(code, message, trailers)
    context.set_code(code)
    context.set_details(message)
    context.set_trailing_metadata(trailers)


class _Border(grpc.GenericRpcHandler):
    """Stands around every handler of the server, which knows of no other.

    Not an interceptor: grpc makes coroutines and closures for those, for each call anew.
    """

    def __init__(self, admit: Admit, services: Sequence[Service]) -> None:
        """Begin. `services`: the process's own; to the others, which are gRPC's, clients say names alone."""
        self._admit = admit
        self._services = {service.full_name: service for service in services}
        self._slow = _SlowMessages()
        self._handlers: dict[str, Any] = {}
        """Handlers of gRPC by the path of their method."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handlers.get(handler_call_details.method)

    # What generated code asks of a server that it adds a servicer to.

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Do nothing: the same handlers are registered by name."""

    def add_registered_method_handlers(self, service_name: str, handlers: Mapping[str, Any]) -> None:
        service = self._services.get(service_name)
        takes_bytes = service is not None and service.takes_bytes
        for name, handler in handlers.items():
            found = descriptor_pool.Default().FindMethodByName(f"{service_name}.{name}")
            kind = message_factory.GetMessageClass(found.input_type)
            parse = None if takes_bytes else _parse(kind, is_long=service is not None)
            method = f"/{service_name}/{name}"
            self._handlers[method] = self._around(handler, method, parse)

    def _around(self, handler: Any, method: str, parse: Callable[[bytes], Any] | None) -> Any:
        kinds = {
            # As streams: grpc itself would read the message before a call is admitted, and wait for ever.
            (False, False): (grpc.stream_unary_rpc_method_handler, handler.unary_unary),
            (False, True): (grpc.stream_stream_rpc_method_handler, handler.unary_stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
            (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
        }
        make, behaviour = kinds[handler.request_streaming, handler.response_streaming]
        reads_stream = handler.request_streaming
        is_held = handler.response_streaming and method.split("/")[1] not in self._services
        # What grpc itself cannot parse it calls UNKNOWN, and it parses on the event loop.
        bordered = _bordered(
            behaviour,
            method,
            partial(_admit_few, self._admit, Counter()) if is_held else self._admit,
            handler.response_streaming,
            None if reads_stream else self._slow,
            None if reads_stream else parse,
        )
        return make(bordered, parse if reads_stream else None, handler.response_serializer)


async def _hear(context: Context) -> None:
    """Let a client write what it began with.

    Where its write meets the call's end, its own library reports INTERNAL in place of the status.
    """
    with suppress(TimeoutError, DecodeError, InvalidRequestError):
        async with asyncio.timeout(HEAR_S):
            await context.read()


class _SlowMessages:
    """Calls whose messages take long, each with what ends it; the slowest gives way to one too many."""

    def __init__(self) -> None:
        self._ends: dict[Alarm, asyncio.TimerHandle] = {}

    def came(self, alarm: Alarm) -> None:
        if len(self._ends) >= MAX_SLOW_MESSAGES:
            self._end(next(iter(self._ends)), _too_many)
        left_s = MESSAGE_TIMEOUT_S - SLOW_S
        self._ends[alarm] = asyncio.get_running_loop().call_later(left_s, self._end, alarm)

    def gone(self, alarm: Alarm) -> None:
        if (end := self._ends.pop(alarm, None)) is not None:
            end.cancel()

    def _end(self, alarm: Alarm, error: Callable[[], ServeError] | None = None) -> None:
        self.gone(alarm)
        alarm.ring(error)


async def _message(context: Context, slow: _SlowMessages) -> bytes:
    """Return the one message of a call as it came.

    Raises DeadlineError, RejectedError and InvalidRequestError.
    """
    message: Any
    with Alarm(_too_slow) as alarm:
        timer = asyncio.get_running_loop().call_later(SLOW_S, slow.came, alarm)
        try:
            message = await context.read()
        finally:
            timer.cancel()
            slow.gone(alarm)
    if message is grpc.aio.EOF:
        raise InvalidRequestError("the call ended without a message")
    return bytes(message)


def _too_slow() -> DeadlineError:
    return DeadlineError(f"the message took longer than {MESSAGE_TIMEOUT_S:g} s")


def _too_many() -> RejectedError:
    return RejectedError(f"{MAX_SLOW_MESSAGES} messages are slow already, and this one has been for longest")


def _parse(kind: type[Message], is_long: bool) -> Callable[[bytes], Any]:
    """Return what parses a message, and raises InvalidRequestError for one of too many parts, or too long."""

    def parse(data: bytes) -> Any:
        if not is_long and len(data) > FREE_BYTES:
            raise InvalidRequestError(
                f"the message has {len(data)} bytes; at most {FREE_BYTES} make sense here"
            )
        return parsed(data, kind)

    return parse


class _Taking:
    """Rings when a call's client has taken nothing of a write for one to two `WRITE_TIMEOUT_S`.

    One timer for the call: one for each write is a part of what a token costs.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._seen = 0
        self.num_turns = 0
        """Writes begun and ended: odd while one is under way."""
        self._wait()

    def close(self) -> None:
        self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(WRITE_TIMEOUT_S, self._look)

    def _look(self) -> None:
        if self.num_turns % 2 and self.num_turns == self._seen:
            self._ring()
        else:
            self._seen = self.num_turns
            self._wait()


async def _written(context: Context, answer: AsyncGenerator[Any, None]) -> None:
    """Write a stream out; raises DeadlineError if the client does not take it."""
    with Alarm(_not_read) as alarm:
        taking = _Taking(alarm.ring)
        try:
            async with aclosing(answer) as responses:
                async for response in responses:
                    taking.num_turns += 1
                    try:
                        await context.write(response)
                    except asyncio.CancelledError as error:
                        await answer.athrow(error)  # the alarm that rang may be the handler's own
                        raise
                    taking.num_turns += 1
        finally:
            taking.close()


def _not_read() -> DeadlineError:
    return DeadlineError(f"nothing of the answer was read for {WRITE_TIMEOUT_S:g} s")


def _bordered(
    behaviour: Callable[[Any, Any], Any],
    method: str,
    admit: Admit,
    is_streaming: bool,
    slow: _SlowMessages | None,
    parse: Callable[[bytes], Any] | None,
) -> Callable[[Any, Any], Awaitable[Any]]:
    """Return a handler with the border around it; without `slow` it reads its messages itself."""

    async def run(request: Any, context: Context) -> Any:
        unheard = True
        try:
            with admit(method, context):
                unheard = False
                if slow is not None:
                    request = await _message(context, slow)
                if parse is not None:
                    request = await on_body(request, parse)
                answer = behaviour(request, context)
                if not isinstance(answer, AsyncGenerator):
                    return await answer
                await _written(context, answer)
        except ServeError as error:
            if unheard:
                await _hear(context)
            await _end_call(context, error, is_streaming)
        except DecodeError as error:
            refused = InvalidRequestError(f"no message of this method: {error}")
            await _end_call(context, refused, is_streaming)
        except grpc.aio.AbortError:
            raise
        except Exception:
            log.exception("handler failed method=%s", method)
            await context.abort(grpc.StatusCode.INTERNAL, "the server failed; its log says how")

    return run
