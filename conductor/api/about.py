"""Answers about the server and its model: models, health, metrics, version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.responses import Response

from base.metrics import CONTENT_TYPE, exposition
from conductor.api.backend import Backend
from conductor.api.http_reply import json_response
from conductor.api.options import require_model
from conductor.api.served_model import named_sampling


def models(backend: Backend) -> dict[str, Any]:
    return {"object": "list", "data": [_card(backend)]}


def one_model(backend: Backend, name: str) -> dict[str, Any]:
    """Return the model's card; raises UnknownModelError."""
    require_model(backend.model, name)
    return _card(backend)


def _card(backend: Backend) -> dict[str, Any]:
    model = backend.model
    return {
        "id": model.name,
        "object": "model",
        "created": backend.started_s,
        "owned_by": "conductor",
        "max_model_len": model.max_model_len,
        "sampling": named_sampling(model.sampling),
    }


def health(backend: Backend) -> Response:
    is_ready = backend.completions.is_ready
    return json_response({"status": "ok" if is_ready else "unavailable"}, 200 if is_ready else 503)


def metrics(backend: Backend) -> Response:
    return Response(exposition(backend.completions.metrics.registry), media_type=CONTENT_TYPE)


def show_version(backend: Backend) -> dict[str, str]:
    return {"version": server_version()}


def server_version() -> str:
    """Return the version of what is installed; of a source tree that was not, what says so."""
    try:
        return version("conductor-cluster")
    except PackageNotFoundError:
        return "0+unknown"
