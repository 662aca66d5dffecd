"""Nothing of ours unpickles: not by name in a source file, and not by way of a library either."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_house_rules import PACKAGES

ROOT = Path(__file__).parent.parent
BANNED_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
BANNED_CALLS = {"eval", "exec", "compile"}

# Every module is imported with unpickling broken: a module that loads anything so at import
# fails, and so does whatever a process does on the way to being ready to serve.
HOOK = """
import builtins, pickle, _pickle, marshal, sys
def refuse(*args, **kwargs):
    raise AssertionError("something was unpickled")
for module in (pickle, _pickle):
    module.loads = module.load = module.Unpickler = refuse
"""
SERVES = """
import asyncio, json, random, tempfile, urllib.request
from pathlib import Path
from tests.conductor.fakes import serving, spoken, tiny_model

async def main():
    model = tiny_model(Path(tempfile.mkdtemp()))
    async with serving(model, lambda request: spoken(model, "hi")) as api:
        def ask():
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
            body = json.dumps(chat).encode()
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(api.url + "/v1/chat/completions", body, headers)
            return urllib.request.urlopen(request, timeout=60).read()
        assert b"[DONE]" in await asyncio.to_thread(ask)
asyncio.run(main())
print("served")
"""


def source_files():
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def test_no_source_file_imports_or_calls_what_runs_data():
    for file in source_files():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            else:
                names = set()
            assert not names & BANNED_MODULES, f"{file}:{node.lineno}"
            if isinstance(node, ast.Call):
                called = node.func
                assert not (isinstance(called, ast.Name) and called.id in BANNED_CALLS), (
                    f"{file}:{node.lineno}"
                )
                is_load = isinstance(called, ast.Attribute) and called.attr == "load"
                owner = getattr(getattr(called, "value", None), "id", "")
                assert not (is_load and owner == "torch"), f"{file}:{node.lineno}"


@pytest.mark.parametrize("work", [SERVES], ids=["the conductor serves"])
def test_nothing_is_unpickled_on_the_way_of_a_request(work):
    done = subprocess.run(
        [sys.executable, "-c", HOOK + work], capture_output=True, text=True, cwd=ROOT, timeout=100
    )
    assert done.stdout.endswith("served\n"), done.stderr


def test_the_hook_would_notice():
    done = subprocess.run(
        [sys.executable, "-c", HOOK + "import pickle; pickle.loads(b'N.')"], capture_output=True, text=True
    )
    assert "something was unpickled" in done.stderr
