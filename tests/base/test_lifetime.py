"""Who holds a process, and when it ends."""

import asyncio
import gc
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from base.lifeline import ANSWERS, ASKS, KEEPS, SUPERVISES, hold, listen_at
from base.lifetime import NOBODY_HOLDS, Lifetime
from base.metrics import export_supervised, process_registry

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import asyncio
from base.lifetime import Lifetime

async def live():
    lifetime = Lifetime()
    await lifetime.ready()
    print(await lifetime.stopped(), flush=True)

asyncio.run(live())
"""


class Held:
    """A lifetime in this process, whose parent is a pipe of ours."""

    def __init__(self, lifetime, parent, said):
        self.lifetime, self.parent, self.said = lifetime, parent, said
        self.ended = asyncio.ensure_future(lifetime.stopped())


@pytest.fixture
async def begin(tmp_path, monkeypatch):
    """Return what begins a lifetime; standard input and output are pipes meanwhile."""
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr("gc.set_threshold", lambda count: None)
    monkeypatch.setattr("os.dup2", lambda *descriptors: None)
    opened = []

    async def start(is_listening=True, adoption_s=3600.0, has_parent=True):
        stdin, parent = os.pipe()
        said, stdout = os.pipe()
        opened.append(os.fdopen(parent, "wb"))
        if not has_parent:
            opened[-1].close()
        monkeypatch.setattr(sys, "stdin", os.fdopen(stdin))
        monkeypatch.setattr(sys, "stdout", os.fdopen(stdout, "w"))
        lifetime = Lifetime(tmp_path / "p.sock" if is_listening else None, adoption_s)
        await lifetime.ready(port=7)
        with os.fdopen(said) as reading:
            return Held(lifetime, opened[-1], json.loads(reading.readline()))

    yield start
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
    for parent in opened:
        parent.close()


async def held(path, kind):
    """Return a reader and a writer of a new lifeline."""
    return await asyncio.open_connection(sock=hold(path, kind))


async def test_the_server_of_lifelines_is_kept(begin, monkeypatch):
    class ServerOfUvloop:
        """A server that nothing but its owner keeps, and that closes its socket when it is collected."""

    made = []

    async def create_unix_server(factory, sock):
        sock.close()
        server = ServerOfUvloop()
        made.append(weakref.ref(server))
        return server

    monkeypatch.setattr(asyncio.get_running_loop(), "create_unix_server", create_unix_server)
    process = await begin()
    gc.collect()
    assert made[0]() is not None
    process.parent.close()
    await process.ended


async def test_a_process_says_that_it_is_ready_and_sigterm_ends_it(begin):
    process = await begin()
    assert process.said == {"event": "ready", "port": 7}
    os.kill(os.getpid(), signal.SIGTERM)
    assert await process.ended == "SIGTERM"


async def test_a_process_without_a_socket_ends_with_its_parent(begin):
    process = await begin(is_listening=False)
    process.parent.close()
    assert await process.ended == NOBODY_HOLDS


@pytest.mark.parametrize("name", ["/dev/null", "file"])
def test_a_process_whose_input_nobody_can_close_lives_until_a_signal(name, tmp_path):
    (tmp_path / "file").write_text("x")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    with (
        (tmp_path / name).open() as stdin,
        subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=stdin, **pipes) as process,
    ):
        ready = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        ended, logged = process.communicate(timeout=60)
    assert (json.loads(ready or "{}"), ended, logged) == ({"event": "ready"}, "SIGTERM\n", "")


async def test_a_process_whose_parent_ended_first_leaves_the_socket_to_its_successor(begin, tmp_path):
    with listen_at(tmp_path / "p.sock") as successor:
        before = (tmp_path / "p.sock").stat().st_ino
        process = await begin(has_parent=False)
        assert await process.ended == NOBODY_HOLDS
        assert (tmp_path / "p.sock").stat().st_ino == before
        hold(tmp_path / "p.sock", KEEPS).close()
        successor.accept()[0].close()


async def test_a_process_that_was_never_held_ends_with_its_parent(begin):
    process = await begin()
    process.parent.close()
    assert await process.ended == NOBODY_HOLDS


async def test_a_process_lives_while_anybody_holds_it_and_waits_to_be_adopted(begin, tmp_path):
    process = await begin(adoption_s=0.0)
    _, first = await held(tmp_path / "p.sock", KEEPS)
    reader, second = await held(tmp_path / "p.sock", SUPERVISES)
    assert json.loads(await reader.readline()) == process.said
    process.parent.close()
    first.close()
    second.write(ASKS)
    assert await reader.readexactly(1) == ANSWERS
    assert not process.ended.done()
    second.close()
    assert await process.ended == NOBODY_HOLDS


async def test_who_comes_before_the_time_is_over_adopts_the_process(begin, tmp_path):
    process = await begin()
    reader, first = await held(tmp_path / "p.sock", SUPERVISES)
    await reader.readline()
    process.parent.close()
    first.close()
    reader, second = await held(tmp_path / "p.sock", SUPERVISES)
    assert json.loads(await reader.readline()) == process.said
    assert process.lifetime.is_supervised
    second.close()


async def test_a_keeper_lets_a_process_live_and_supervises_nothing(begin, tmp_path):
    process = await begin()
    registry = process_registry()
    export_supervised(registry, process.lifetime)
    reader, keeper = await held(tmp_path / "p.sock", KEEPS)
    assert registry.get_sample_value("conductor_process_supervised") == 1.0
    process.parent.close()
    while process.lifetime.is_supervised:
        keeper.write(ASKS)
        assert await reader.readexactly(1) == ANSWERS
    assert registry.get_sample_value("conductor_process_supervised") == 0.0
    keeper.close()


async def test_every_question_of_many_is_answered(begin, tmp_path):
    await begin()
    reader, writer = await held(tmp_path / "p.sock", SUPERVISES)
    await reader.readline()
    writer.write(ASKS * 5000)
    assert await reader.readexactly(5000) == ANSWERS * 5000
    writer.close()


async def test_nobody_else_opens_the_socket_and_its_path_may_be_long(begin, tmp_path):
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    await begin()
    (tmp_path / "p.sock").rename(folder / "p.sock")
    assert stat.S_IMODE((folder / "p.sock").stat().st_mode) == 0o600
    _, writer = await held(folder / "p.sock", KEEPS)
    writer.close()


def test_a_socket_that_nobody_listens_at_is_no_process(tmp_path):
    assert hold(tmp_path / "none.sock", KEEPS) is None
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(tmp_path / "ended.sock"))
    assert hold(tmp_path / "ended.sock", KEEPS) is None


async def test_who_has_no_descriptor_left_does_not_take_a_process_for_none(begin, tmp_path):
    await begin()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            hold(tmp_path / "p.sock", KEEPS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
