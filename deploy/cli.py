"""The `conductor` command: a table of sub-commands, each loaded only when it is run.

torch takes 1.7 s to import, transformers 1.3 and ray 0.5; `conductor --help` needs none
of them. So a sub-command is a line of text here, `module:function`, and the function is
imported when its name is the one that was typed. A sub-command's function has typed
parameters as typer reads them, or takes `argv: list[str]` and parses that itself. What it
raises for a person to read ends the command with status 1.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer

from deploy.api_client import ApiError

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("deploy.up:main", "Start a cluster, serve, drain on Ctrl-C."),
    "chat": ("deploy.chat:main", "Talk to a running cluster."),
    "batch": (
        "deploy.batch:main",
        "Ask a file of requests of a running cluster; a run goes on where it stopped.",
    ),
    "status": ("deploy.status:main", "Show nodes, blocks and queues of a running cluster."),
    "top": ("deploy.top:top", "Watch a running cluster."),
    "explain": ("deploy.explain:main", "Show why a request went where it went, and how it went."),
    "scale": ("deploy.scale:scale", "Start or drain nodes of a running cluster; no request is lost."),
    "autoscale": (
        "deploy.autoscale:main",
        "Resize a running cluster to what would have served its last hour.",
    ),
    "restart": ("deploy.scale:restart", "Restart the nodes one after the other; no request is lost."),
    "stop": ("deploy.stop:main", "Drain a running cluster and end it."),
    "logs": ("deploy.logs:main", "Print what the processes of a cluster logged."),
    "doctor": ("deploy.doctor:main", "Look for what is wrong with this host or cluster."),
    "keys": ("deploy.keys:main", "Make, list and remove API keys."),
    "replay": ("bench.papers.command:main", "Run a trace through the scheduler in virtual time."),
    "advise": ("bench.papers.advise:main", "Find how many nodes a trace needs to be served within bounds."),
    "bench": ("bench.load_command:main", "Open-loop load on a running cluster or any OpenAI server."),
    "profile": ("bench.profile_command:main", "Time the engine on this device and write a profile."),
}


def main(argv: list[str] | None = None) -> None:
    """Run the command line; ends by SystemExit."""
    _open_streams()
    arguments = sys.argv[1:] if argv is None else argv
    wanted = next((argument for argument in arguments if not argument.startswith("-")), "")
    expected: tuple[type[Exception], ...] = (ApiError, ConnectionError, TimeoutError)
    if wanted:  # `--help` has no use for grpc, which is imported with it
        expected = (*expected, importlib.import_module("base.errors").ConfigError)
    try:
        app(wanted)(arguments, prog_name="conductor")
    except expected as error:
        print(error, file=sys.stderr)
        sys.exit(1)


def _open_streams() -> None:
    """Let standard streams that the caller has closed (`>&-`) lead nowhere.

    Else the next file or socket that is opened would be the standard output of all that is started.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def app(wanted: str = "") -> typer.Typer:
    """Return the whole command line, of which `wanted` alone can be run."""
    cluster = typer.Typer(
        help="A disaggregated prefill/decode LLM inference cluster.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @cluster.callback()
    def group(
        show_version: Annotated[
            bool,
            typer.Option("--version", help="Show the version.", is_eager=True, callback=_version),
        ] = False,
    ) -> None:
        """Keep typer from making a single command into the whole app."""

    for name, (place, summary) in COMMANDS.items():
        module, _, function = place.partition(":")
        command: Callable[..., Any] = (
            getattr(importlib.import_module(module), function) if name == wanted else _not_loaded
        )
        if "argv" in inspect.signature(command).parameters:
            settings = {"allow_extra_args": True, "ignore_unknown_options": True}
            cluster.command(name, help=summary, context_settings=settings, add_help_option=False)(
                _parsing_itself(command)
            )
        else:
            cluster.command(name, help=summary)(command)
    return cluster


def _version(is_asked: bool) -> None:
    if is_asked:
        print(f"conductor {version('conductor-cluster')}")
        raise typer.Exit


def _not_loaded() -> None:
    """Stands in for the commands that were not typed: the help lists them."""


def _parsing_itself(command: Callable[..., Any]) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        raise typer.Exit(command(context.args) or 0)

    return run
