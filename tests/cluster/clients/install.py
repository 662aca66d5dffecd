"""Environments of the libraries that clients use, each in a folder of its own: they want different versions.

    python tests/cluster/clients/install.py [NAME ...]

They are kept in the cache, so that they are made once; none is a dependency of ours.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
CACHE_DIR = Path("~/.cache/conductor-cluster/clients").expanduser()
TIMEOUT_S = 900


class Library(NamedTuple):
    """A script of this folder, and the packages that it uses."""

    script: str
    packages: tuple[str, ...]

    @property
    def is_for_node(self) -> bool:
        return self.script.endswith(".mjs")


_NODE = ("openai@6.49.0", "ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7")

_LLAMA_INDEX = ("llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0")

LIBRARIES = {
    "instructor": Library("instructor_client.py", ("instructor==1.17.0",)),
    "langchain": Library("langchain_client.py", ("langchain-openai==1.7.3",)),
    "litellm": Library("litellm_client.py", ("litellm==1.106.2", "mcp")),
    "llama-index": Library("llama_index_client.py", _LLAMA_INDEX),
    "lm-eval": Library("lm_eval_client.py", ("lm-eval[api]==0.4.13", "transformers>=5.17,<6")),
    "openai for node": Library("openai_client.mjs", _NODE),
    "pydantic-ai": Library("pydantic_ai_client.py", ("pydantic-ai-slim[openai,anthropic]==2.68.0",)),
    "tritonclient": Library("triton_client.py", ("tritonclient[grpc]==2.73.0",)),
    "vercel ai sdk": Library("ai_sdk_client.mjs", _NODE),
}


class CannotInstallError(Exception):
    """A library is not to be had on this machine."""


def installed(name: str) -> list[str]:
    """Return the command that runs a library's script, after installing it if need be."""
    library = LIBRARIES[name]
    folder = CACHE_DIR / ("node" if library.is_for_node else name)
    marker = folder / "installed.json"
    if not marker.exists() or json.loads(marker.read_text()) != list(library.packages):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (_install_for_node if library.is_for_node else _install_for_python)(folder, library.packages)
        marker.write_text(json.dumps(library.packages))
    if not library.is_for_node:
        return [str(folder / "bin" / "python"), str(HERE / library.script)]
    # Node looks for packages beside the script.
    shutil.copy(HERE / library.script, folder)
    return ["node", str(folder / library.script)]


def _install_for_python(folder: Path, packages: tuple[str, ...]) -> None:
    _run([sys.executable, "-m", "venv", str(folder)], folder)
    _run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages], folder)


def _install_for_node(folder: Path, packages: tuple[str, ...]) -> None:
    if shutil.which("npm") is None or shutil.which("node") is None:
        raise CannotInstallError("node and npm are not here")
    (folder / "package.json").write_text('{"private": true}')
    _run(["npm", "install", "--silent", "--no-audit", "--no-fund", *packages], folder)


def _run(command: list[str], folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise CannotInstallError((done.stderr or done.stdout).strip()[-500:])


if __name__ == "__main__":
    for each in sys.argv[1:] or LIBRARIES:
        print(each, *installed(each))
