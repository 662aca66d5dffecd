"""The page at /ui: nodes, pools, queues, hit rate, requests, why one went where it went, and dashboards.

Three files of `web/`, served as they are: no build step, nothing from anywhere else. All that
is shown comes from /status, /metrics, /v1/explain and /v1/panels, which programs read too; the page has no
data of its own, no prompt and no key. It puts every value into the document as text, never as
markup, and its Content-Security-Policy lets no other script run if it ever did.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import RedirectResponse, Response

FOLDER = Path(__file__).parent / "web"

READ = ["GET", "HEAD"]
FILES = {
    "/ui": ("index.html", "text/html"),
    "/ui/page.js": ("page.js", "text/javascript"),
    "/ui/style.css": ("style.css", "text/css"),
}

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_web_page(app: FastAPI) -> None:
    """Add the routes of the page."""
    for path, (file, media_type) in FILES.items():
        content = (FOLDER / file).read_bytes()
        app.add_api_route(path, _route(content, media_type), methods=READ, name=path)

    @app.api_route("/", methods=READ)
    async def lead() -> Response:
        return RedirectResponse("/ui")


def _route(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return answer
