"""`conductor chat`: talk to a running cluster, with the conversation so far as the prompt."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Annotated

import typer

from deploy.api_client import ApiError, ChatStream, read_json

ADDRESS = "127.0.0.1:8000"


def main(
    message: Annotated[str, typer.Argument(help="Say this and end; without it, a conversation")] = "",
    address: Annotated[str, typer.Option(help="host:port of the conductor's HTTP API")] = ADDRESS,
    system: Annotated[str, typer.Option(help="The system message")] = "",
    max_tokens: Annotated[int, typer.Option(help="Of one answer at most")] = 512,
    json_: Annotated[bool, typer.Option("--json", help="Print each answer as a JSON object")] = False,
) -> None:
    """Talk to the cluster."""
    messages = [{"role": "system", "content": system}] if system else []
    try:
        model = read_json(address, "/v1/models")["data"][0]["id"]
        while said := message or _asked():
            messages.append({"role": "user", "content": said})
            answer = _print_answer(ChatStream(address, model, messages, max_tokens=max_tokens), json_)
            messages.append({"role": "assistant", "content": answer})
            if message:
                return
    except ApiError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error


def _asked() -> str:
    """Return the next line a person types; empty at the end of input."""
    with contextlib.suppress(EOFError):
        while True:
            if line := input("> " if sys.stdin.isatty() else "").strip():
                return line
    return ""


def _print_answer(stream: ChatStream, as_json: bool) -> str:
    pieces = []
    with contextlib.closing(stream):
        for piece in stream.pieces():
            pieces.append(piece)
            if not as_json:
                print(piece, end="", flush=True)
    answer = "".join(pieces)
    print(json.dumps({"answer": answer}) if as_json else "", flush=True)
    return answer
