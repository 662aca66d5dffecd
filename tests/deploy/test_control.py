"""The socket of a running `conductor up`: every request is answered, and a wrong one with its reason."""

import asyncio
import json

import pytest

from base.errors import ConfigError
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


async def answered(path, line):
    """Return the last line that the socket answers to `line`."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(line + b"\n")
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return json.loads(answer.splitlines()[-1])


def asked(**request):
    return json.dumps(request).encode()


async def test_a_change_is_made_and_told(tmp_path):
    cluster = Changes()
    async with controlled(cluster, tmp_path / "s"):
        said = await asyncio.to_thread(lambda: list(ask(tmp_path / "s", {"verb": "scale", "decode": 2})))
        assert said == ["scaling"]
        assert await answered(tmp_path / "s", asked(verb="restart")) == {"done": True}
    assert cluster.made == [(None, 2), "restart"]
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("size", ["3", 3.0, 1.5, None, True, [3], {"n": 3}, -1, 10**9])
@pytest.mark.parametrize("pool", ["prefill", "decode"])
async def test_a_size_that_is_no_count_is_refused_by_its_name(pool, size, tmp_path):
    cluster = Changes()
    async with controlled(cluster, tmp_path / "s"):
        answer = await answered(tmp_path / "s", asked(verb="scale", **{pool: size}))
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
async def test_a_line_that_is_no_request_is_answered_with_the_reason(line, told, tmp_path):
    cluster = Changes()
    async with controlled(cluster, tmp_path / "s"):
        assert told in (await answered(tmp_path / "s", line))["error"]
        assert await answered(tmp_path / "s", asked(verb="restart")) == {"done": True}, "it goes on"
    assert cluster.made == ["restart"]


async def test_the_command_raises_what_the_cluster_refused(tmp_path):
    async with controlled(Changes(), tmp_path / "s"):
        with pytest.raises(ConfigError, match="decode: a whole number"):
            await asyncio.to_thread(lambda: list(ask(tmp_path / "s", {"verb": "scale", "decode": 1.5})))
