"""The socket of a running `conductor up`: every request is answered, and a wrong one with its reason."""

import asyncio
import json
import os
import socket

import pytest

from base.errors import ConfigError
from deploy.clusters import Running, folder_of
from deploy.control import ask, controlled


class Changes:
    """Stands in for a running cluster: remembers what it was told to become."""

    def __init__(self):
        self.made = []

    async def scale(self, prefill, decode, say):
        say("scaling")
        self.made.append((prefill, decode))

    async def restart(self, say):
        self.made.append("restart")


@pytest.fixture
def identity(tmp_path):
    """Of a cluster whose socket's path is longer than the kernel takes."""
    cache = tmp_path / ("long" * 30)
    folder_of(str(cache)).mkdir(parents=True)
    return Running("a", os.getpid(), socket.gethostname(), "", str(cache), str(cache / "run"), ())


async def answered(identity, line):
    """Return the last line that the socket answers to `line`."""
    folder = os.open(folder_of(identity.cache_dir), os.O_PATH)
    reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{identity.socket_name}")
    os.close(folder)
    writer.write(line + b"\n")
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return json.loads(answer.splitlines()[-1])


def asked(**request):
    return json.dumps(request).encode()


async def test_a_change_is_made_and_told(identity):
    cluster = Changes()
    async with controlled(cluster, identity):
        said = await asyncio.to_thread(lambda: list(ask(identity, {"verb": "scale", "decode": 2})))
        assert said == ["scaling"]
        assert await answered(identity, asked(verb="restart")) == {"done": True}
    assert cluster.made == [(None, 2), "restart"]
    assert list(folder_of(identity.cache_dir).iterdir()) == []


@pytest.mark.parametrize("size", ["3", 3.0, 1.5, None, True, [3], {"n": 3}, -1, 10**9])
@pytest.mark.parametrize("pool", ["prefill", "decode"])
async def test_a_size_that_is_no_count_is_refused_by_its_name(pool, size, identity):
    cluster = Changes()
    async with controlled(cluster, identity):
        answer = await answered(identity, asked(verb="scale", **{pool: size}))
    assert answer["error"].startswith(f"{pool}: a whole number")
    assert cluster.made == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (asked(verb="scale", storage=1), "storage: prefill and decode are known"),
        (asked(verb="restart", prefill=1), "unknown request"),
        (asked(verb="stop"), "unknown request"),
        (asked(), "unknown request"),
        (b"[1]", "unknown request"),
        (b"7", "unknown request"),
        (b"null", "unknown request"),
        (b"", "Expecting value"),
        (b"{", "Expecting"),
        (b"\xff\xfe", "decode"),
        (b"[" * 4000, ""),
        (b'"' + b"x" * 5000 + b'"', ""),
    ],
)
async def test_a_line_that_is_no_request_is_answered_with_the_reason(line, told, identity):
    cluster = Changes()
    async with controlled(cluster, identity):
        assert told in (await answered(identity, line))["error"]
        assert await answered(identity, asked(verb="restart")) == {"done": True}, "it goes on"
    assert cluster.made == ["restart"]


async def test_the_command_raises_what_the_cluster_refused(identity):
    async with controlled(Changes(), identity):
        with pytest.raises(ConfigError, match="decode: a whole number"):
            await asyncio.to_thread(lambda: list(ask(identity, {"verb": "scale", "decode": 1.5})))
