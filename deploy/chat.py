"""`conductor chat`: talk to a running cluster, with the conversation so far as the prompt."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Annotated, Any

import typer

from deploy import calculator
from deploy.api_client import ChatStream, read_json
from deploy.options import ADDRESS, Address

MAX_ROUNDS = 8
"""Answers to one message that may call the tool, so that a model that always calls comes to an end."""
CALM_TEMPERATURE = 0.2
"""The temperature for models that name none of their own: small ones answer with nonsense at OpenAI's 1."""


def main(
    message: Annotated[str, typer.Argument(help="Say this and end; without it, a conversation")] = "",
    address: Address = ADDRESS,
    system: Annotated[str, typer.Option(help="The system message")] = "",
    max_tokens: Annotated[int, typer.Option(help="Of one answer at most")] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(
            help=f"0: the likeliest answer; else the model's own, or {CALM_TEMPERATURE} if it names none"
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print each answer as a JSON object")] = False,
    with_calculator: Annotated[
        bool, typer.Option("--calculator", help="Let the model compute by a tool that runs here")
    ] = False,
) -> None:
    """Talk to the cluster. Ctrl-C ends an answer; at the prompt, Ctrl-C or Ctrl-D ends the chat."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    model = read_json(address, "/v1/models")["data"][0]
    options: dict[str, Any] = {"max_tokens": max_tokens}
    if temperature is not None or not model.get("sampling"):
        options["temperature"] = CALM_TEMPERATURE if temperature is None else temperature
    if with_calculator:
        options["tools"] = [calculator.TOOL]
    while said := message or _asked():
        messages.append({"role": "user", "content": said})
        for number in range(MAX_ROUNDS):
            # A small model decides on no call by itself: asked to compute, it has to begin with one.
            is_demanded = with_calculator and not number and any(map(str.isdigit, said))
            demanded = {"tool_choice": "required", "parallel_tool_calls": False} if is_demanded else {}
            stream = ChatStream(address, model["id"], messages, **options, **demanded)
            answer = _print_answer(stream, json_)
            messages += (
                [{"role": "assistant", "content": answer}] if not stream.calls else _called(stream, answer)
            )
            if not stream.calls:
                break
        if message:
            return


def _called(stream: ChatStream, answer: str) -> list[dict[str, Any]]:
    """Carry out the calls of an answer; returns its message and those of the results."""
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": answer, "tool_calls": stream.calls}]
    for call in stream.calls:
        arguments = call["function"]["arguments"]
        result = calculator.result_of(arguments)
        print(f"[calculator {' '.join(arguments.split())} = {result}]", file=sys.stderr)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return messages


def _asked() -> str:
    """Return the next line a person types; empty at the end of input, or on Ctrl-C."""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            if line := input("> " if sys.stdin.isatty() else "").strip():
                return line
    return ""


def _print_answer(stream: ChatStream, as_json: bool) -> str:
    """Print an answer as it comes, and return as much of it as came before Ctrl-C."""
    pieces: list[str] = []
    with contextlib.closing(stream), contextlib.suppress(KeyboardInterrupt):
        for piece in stream.pieces():
            pieces.append(piece)
            if not as_json:
                print(piece, end="", flush=True)
    answer = "".join(pieces)
    print(json.dumps({"answer": answer}) if as_json else "", flush=True)
    return answer
