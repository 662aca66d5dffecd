"""Spans of requests: what tracing offers the rest of the program, which knows no tracing library.

A span is named by its W3C `traceparent`, a line of text that travels with a request: over HTTP
and gRPC from the client, in `Work` to the nodes. Whoever works on the request begins spans below
it, so that one trace shows the request in every process. Nothing here runs where no endpoint is
set: those who begin spans (`conductor/serving/request_spans.py`, `node/tracing.py`) are then not there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from base.config import TracingConfig
from base.errors import ConfigError

if TYPE_CHECKING:
    from base.tracing import Tracer


def tracer_or_none(config: TracingConfig, process: str) -> Tracer | None:
    """Return a tracer of `process`; None: nothing is to be traced.

    Raises:
        ConfigError: an endpoint is set, and OpenTelemetry is not installed.
    """
    if not config.endpoint:
        return None
    try:
        # Most installations have no OpenTelemetry, and who does not trace does not pay for it.
        from base.tracing import Tracer  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"tracing.endpoint: {error}; pip install 'conductor-cluster[tracing]', or leave it empty"
        ) from error
    return Tracer(config, process)
