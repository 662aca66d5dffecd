"""The page at /ui: history, the cluster, requests and their waterfalls, a playground, replays.

The files of `web/`, served as they are: no build step, nothing from anywhere else. `main.js` says which view
is shown, each other module is one view, but for `data.js` (what is asked), `draw.js` (how it is drawn) and
`flows.js` (KV on its way in the picture).
All that is shown comes from /v1/page/NAME; the playground and replays call what programs call. The page has
no data of its own, no prompt and no key. It puts every value into the document as text, never as markup, and
its Content-Security-Policy lets no other script run if it ever did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from starlette.responses import Response

from conductor.api.backend import Backend

FOLDER = Path(__file__).parent / "web"

MODULES = ("main", "data", "draw", "overview", "cluster", "flows", "requests", "playground", "replay")

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page(file: str, media_type: str) -> Callable[[Backend], Response]:
    """Return the handler that shows a file of `web/`."""

    @functools.cache
    def content() -> bytes:
        return (FOLDER / file).read_bytes()

    return lambda backend: Response(content(), media_type=media_type, headers=HEADERS)
