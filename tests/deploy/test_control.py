"""The socket of a running `conductor up`: every request is answered, and a wrong one with its reason."""

import asyncio
import json
import os
import socket

import pytest

from base.errors import ConfigError
from deploy.change import ChangeStoppedError
from deploy.clusters import Running, folder_of
from deploy.control import ask, controlled


class Changes:
    """Stands in for a cluster's nodes: remembers what they were told to become. 999 of them never are."""

    def __init__(self):
        self.made = []

    async def scale(self, prefill, decode, change):
        change.say("scaling")
        if prefill == 999:
            change.progress = "3 of 998 nodes were started"
            await change.stopped.wait()
            raise ChangeStoppedError(f"{change.why}: {change.progress}")
        self.made.append((prefill, decode))

    async def say_plan(self, prefill, decode, say):
        say(f"would be {prefill} {decode}")

    async def restart(self, change):
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
    reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{identity.socket_path.name}")
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


async def test_a_dry_run_says_what_would_be_and_changes_nothing(identity):
    cluster = Changes()
    async with controlled(cluster, identity):
        request = {"verb": "scale", "decode": 2, "dry_run": True}
        assert await asyncio.to_thread(lambda: list(ask(identity, request))) == ["would be None 2"]
    assert cluster.made == []


async def connected(identity, **request):
    """Ask, and return the connection with the first line of its answer."""
    folder = os.open(folder_of(identity.cache_dir), os.O_PATH)
    reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{identity.socket_path.name}")
    os.close(folder)
    writer.write(asked(**request) + b"\n")
    assert json.loads(await asyncio.wait_for(reader.readline(), 60)) == {"said": "scaling"}
    return reader, writer


async def test_a_later_change_replaces_the_one_under_way_and_both_are_told(identity):
    cluster = Changes()
    async with controlled(cluster, identity):
        reader, writer = await connected(identity, verb="scale", prefill=999)
        now = await asyncio.to_thread(lambda: list(ask(identity, {"verb": "status"})))
        assert now == ["under way: scale prefill=999; 3 of 998 nodes were started"]
        later = await asyncio.to_thread(lambda: list(ask(identity, {"verb": "scale", "prefill": 2})))
        assert later == ["replaces `scale prefill=999`: 3 of 998 nodes were started", "scaling"]
        told = json.loads(await asyncio.wait_for(reader.readline(), 60))
        assert told == {"error": "replaced by `scale prefill=2`: 3 of 998 nodes were started"}
        writer.close()
        assert await asyncio.to_thread(lambda: list(ask(identity, {"verb": "status"}))) == []
    assert cluster.made == [(2, None)]


@pytest.mark.parametrize("is_whole", [False, True])
async def test_a_change_ends_with_its_client(is_whole, identity):
    async with controlled(Changes(), identity):
        reader, writer = await connected(identity, verb="scale", prefill=999)
        if is_whole:  # it died
            writer.close()
        else:  # Ctrl-C: it has nothing to say any more, and listens
            writer.write_eof()
            told = json.loads(await asyncio.wait_for(reader.readline(), 60))
            assert told == {"error": "stopped, as its client was: 3 of 998 nodes were started"}
            writer.close()
        async with asyncio.timeout(60):
            while await asyncio.to_thread(lambda: list(ask(identity, {"verb": "status"}))):
                await asyncio.sleep(0)


async def test_a_change_under_way_ends_with_the_cluster(identity):
    async with controlled(Changes(), identity):
        reader, writer = await connected(identity, verb="scale", prefill=999)
    assert "the cluster ends" in json.loads(await asyncio.wait_for(reader.readline(), 60))["error"]
    writer.close()
