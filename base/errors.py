"""Every error that crosses a process boundary, and the gRPC status it becomes.

* ServeError
  - InvalidRequestError      the caller must change the request
    . UnknownModelError      no such model is served
  - UnauthenticatedError     the caller showed no valid key or certificate
  - ForbiddenError           the caller is known and may not do this
  - RejectedError            the cluster is healthy but will not take this request
    . SloUnreachableError    predicted TTFT or TBT is past the request's SLO
    . CapacityError          no node has the blocks free
  - UnavailableError         no node can serve now; retry later
  - DeadlineError            the request's time ran out
  - LostError                work was accepted and then lost; safe to retry
    . LeaseExpiredError      bytes may already be reused; never read them
    . StaleError             a message or grant of an older epoch or generation
    . TransferFailedError    a transport gave up on a transfer batch
    . ChecksumError          bytes arrived, and they are not the ones that were sent
  - ProtocolError            the peer broke the protocol: a bug, never retried
    . ForeignPeerError       the peer speaks another protocol: a wrong address
* ConfigError                the process must not start

The table at the end is applied in one place, `base/rpc.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import grpc


class ServeError(Exception):
    """Base of every expected failure of a request."""


class InvalidRequestError(ServeError):
    """The caller must change the request. `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def invalid(param: str, words: str) -> InvalidRequestError:
    """Return the error of a field, which its message names first."""
    return InvalidRequestError(f"{param}: {words}", param)


class UnknownModelError(InvalidRequestError):
    """The request names a model this cluster does not serve."""


class UnauthenticatedError(ServeError):
    """The caller showed no valid API key or certificate."""


class ForbiddenError(ServeError):
    """The caller may not do this, whatever it changes in the request."""


class RejectedError(ServeError):
    """The cluster is healthy but will not take this request now.

    `retry_after_s` is when asking again is predicted to succeed.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SloUnreachableError(RejectedError):
    """Predicted TTFT or TBT is past the request's SLO. Both predictions, seconds; 0: none was made."""

    def __init__(
        self,
        message: str,
        retry_after_s: float = 1.0,
        predicted_ttft_s: float = 0.0,
        predicted_tbt_s: float = 0.0,
    ) -> None:
        super().__init__(message, retry_after_s)
        self.predicted_ttft_s = predicted_ttft_s
        self.predicted_tbt_s = predicted_tbt_s


class CapacityError(RejectedError):
    """Fewer blocks are free than the request needs. Nothing was taken."""


class UnavailableError(ServeError):
    """No node can serve the request at present."""


class DeadlineError(ServeError):
    """The request's time ran out; what it held was released."""


class LostError(ServeError):
    """Work was accepted and then lost; it is safe to run it again."""


class LeaseExpiredError(LostError):
    """The lease ran out: the bytes may already be reused and are never read."""


class StaleError(LostError):
    """A message, grant or block of an older epoch or generation was refused."""


class TransferFailedError(LostError):
    """A transport gave up on a transfer batch."""


class ChecksumError(LostError):
    """Bytes arrived, and they are not the ones that were sent."""


class ProtocolError(ServeError):
    """The peer sent what cannot follow what it sent before."""


class ForeignPeerError(ProtocolError):
    """The peer speaks another protocol altogether: the address is that of something else."""


class ConfigError(Exception):
    """Configuration is wrong; the message names file, key and mend."""


LOST_RETRY_S = 2.0
"""The time that a lost node takes to be back, roughly; nothing better is known."""


def retry_after_s(error: ServeError) -> float | None:
    """Return when the same request may succeed, or None if it is no matter of time."""
    if isinstance(error, RejectedError):
        return error.retry_after_s
    return LOST_RETRY_S if isinstance(error, UnavailableError | LostError) else None


STATUS_OF: tuple[tuple[type[ServeError], grpc.StatusCode], ...] = (
    (UnknownModelError, grpc.StatusCode.NOT_FOUND),
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    (ForbiddenError, grpc.StatusCode.PERMISSION_DENIED),
    (RejectedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (LostError, grpc.StatusCode.UNAVAILABLE),
    (ProtocolError, grpc.StatusCode.INTERNAL),
)
"""First match wins, so a class stands before its parents."""


def status_of(error: ServeError) -> grpc.StatusCode:
    """Return the gRPC status that `error` becomes at the border."""
    for kind, code in STATUS_OF:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def error_named(name: str, message: str) -> ServeError:
    """Return the error that a peer named; a name not known here is a ServeError."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, ServeError):
        return kind(message)
    return ServeError(message)


def errors_in(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that a group holds, and those of groups within it; of any other error, itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from errors_in(inner)
    else:
        yield error
