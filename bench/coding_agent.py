"""`python -m bench.coding_agent OPENCODE`: a coding agent of others at work in a folder, by a live cluster.

opencode (npm `opencode-ai`), unmodified and offline, is given one prefill and one decode node of this machine
with SmolLM2 as its provider. In one session it asks, carries out what is called in a shell, and asks again
with the result, until so many calls have ended; then it goes on in the same session, and answers in words.

A model of 135 million parameters does not choose tools sensibly. So its answers have a form, by a field that
opencode passes on: a call of the shell in the form of the model's family, whose command is one of a few and
is the model's choice, drawn at a temperature; in the last turn, a sentence. All else is as with any model:
`tool_choice` is auto, calls are read from streamed text, and results come back as messages of tools.

    npm install opencode-ai
    python -m bench.coding_agent node_modules/.bin/opencode --json bench/results/coding_agent.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from base.config import ClusterConfig, EngineConfig, PoolConfig, ServerConfig
from bench.about_run import about_run, write_result
from bench.local_cluster import local_cluster, smollm2

COMMANDS = (
    "ls",
    "cat notes.txt",
    "wc -w notes.txt",
    "python3 add.py 2 3",
    "grep -n return add.py",
    "echo checked >> notes.txt",
    "cat missing.txt",
)
FILES = {
    "notes.txt": "Add two numbers.\n",
    "add.py": "import sys\n\n\ndef add(a, b):\n    return a + b\n\n\nprint(add(*map(int, sys.argv[1:])))\n",
}
PROMPT = "Look around in this folder, try add.py, and tell me what it does."
LAST_PROMPT = "Now say in one sentence what you found."
SENTENCE = r"[A-Z][A-Za-z0-9 ,'.]{10,80}\."
TIMEOUT_S = 900.0

Json = dict[str, Any]


def call_form() -> str:
    """Return the regular expression of a call of the shell."""
    commands = "|".join(map(re.escape, COMMANDS)).replace("\\ ", " ").replace("\\-", "-")
    arguments = rf'\{{"command": "({commands})", "description": "[A-Z][a-z ]{{3,20}}"\}}'
    return rf'<tool_call>\n\{{"name": "bash", "arguments": {arguments}\}}\n</tool_call>'


def write_config(folder: Path, url: str, form: str) -> None:
    """Write what opencode reads in its folder."""
    model = {
        "name": "SmolLM2",
        "temperature": True,
        "limit": {"context": 8192, "output": 128},
        "options": {"guided_regex": form},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Conductor",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"smollm2": model},
    }
    worker = {
        "mode": "primary",
        "description": "Works in a shell.",
        "prompt": "You are a coding agent in a shell. Use the bash tool.",
        "temperature": 0.8,
        "tools": {"*": False, "bash": True},
        "permission": {"bash": "allow", "doom_loop": "allow"},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"conductor": provider},
        "model": "conductor/smollm2",
        "small_model": "conductor/smollm2",
        "autoupdate": False,
        "share": "disabled",
        "agent": {"title": {"disable": True}, "worker": worker},
    }
    (folder / "opencode.json").write_text(json.dumps(config))


def events(opencode: Path, folder: Path, home: Path, *arguments: str) -> Iterator[Json]:
    """Yield what opencode reports of its work; it ends when the caller has heard enough."""
    command = [str(opencode), "run", "--format", "json", "--agent", "worker", "-m", "conductor/smollm2"]
    environment = {**os.environ, "HOME": str(home), "PWD": str(folder), "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    process = subprocess.Popen(
        [*command, *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def worked(reports: Iterator[Json], num_calls: int) -> Iterator[Json]:
    """Yield a row for each turn of the agent, until so many calls have ended."""
    turn: Json = {}
    begun_s = time.monotonic()
    for event in reports:
        part = event.get("part", {})
        if event["type"] == "tool_use":
            state = part["state"]
            turn = {
                "tool": part["tool"],
                "command": state["input"].get("command"),
                "status": state["status"],
                "exit": state.get("metadata", {}).get("exit"),
                "output": state.get("output", "")[:80],
            }
        elif event["type"] == "text":
            turn = {"text": part["text"]}
        elif event["type"] == "error":
            turn = {"error": str(event)[:300]}
        if event["type"] in ("step_finish", "error"):
            tokens = part.get("tokens", {})
            turn |= {"session": event["sessionID"], "reason": part.get("reason")}
            turn |= {"input_tokens": tokens.get("input"), "output_tokens": tokens.get("output")}
            turn |= {"cached_tokens": tokens.get("cache", {}).get("read")}
            turn["took_s"] = round(time.monotonic() - begun_s, 1)
            begun_s = time.monotonic()
            yield turn
            num_calls -= 1
            if not num_calls:
                return
            turn = {}


def session(opencode: Path, url: str, num_calls: int, folder: Path) -> list[Json]:
    """Have opencode hold a session; return its turns."""
    work, home = folder / "work", folder / "home"
    work.mkdir()
    home.mkdir()
    for name, text in FILES.items():
        (work / name).write_text(text)
    write_config(work, url, call_form())
    turns = []
    for turn in worked(events(opencode, work, home, PROMPT), num_calls):
        print(json.dumps(turn), flush=True)
        turns.append(turn)
    write_config(work, url, SENTENCE)
    again = ("--session", turns[0]["session"], LAST_PROMPT)
    for turn in worked(events(opencode, work, home, *again), 1):
        print(json.dumps(turn), flush=True)
        turns.append(turn)
    return turns


def summary(turns: list[Json]) -> Json:
    calls = [turn for turn in turns if "tool" in turn]
    read, cached = (sum(turn[name] or 0 for turn in turns) for name in ("input_tokens", "cached_tokens"))
    return {
        "turns": len(turns),
        "turns_with_calls": len(calls),
        "calls_carried_out": sum(turn["status"] == "completed" for turn in calls),
        "different_commands": len({turn["command"] for turn in calls}),
        "sessions": len({turn["session"] for turn in turns}),
        "errors": sum("error" in turn for turn in turns),
        "answer": turns[-1].get("text", ""),
        "cached_percent": round(100 * cached / max(1, read + cached), 1),
        "took_s": round(sum(turn["took_s"] for turn in turns), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("opencode", type=Path, help="the command")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    opencode = options.opencode.resolve()
    version = subprocess.run([opencode, "--version"], capture_output=True, text=True, check=True).stdout
    pool = PoolConfig(engine=EngineConfig(kv_cache_gib=0.75, threads=1, chunk_tokens=256))
    config = ClusterConfig(server=ServerConfig(http_port=0, grpc_port=0), prefill=pool, decode=pool)
    with tempfile.TemporaryDirectory() as name, local_cluster(config, smollm2(), Path(name)) as cluster:
        folder = Path(name) / "agent"
        folder.mkdir()
        turns = session(opencode, cluster.url, options.calls, folder)
        held = sum(node["held_blocks"] for node in cluster.status()["nodes"])
    result = {**summary(turns), "blocks_left_held": held, "turns_made": turns}
    result["about"] = {**about_run(), "versions": {"opencode": version.strip()}}
    print(json.dumps({name: value for name, value in result.items() if name != "turns_made"}, indent=1))
    write_result(options.json, result)


if __name__ == "__main__":
    main()
