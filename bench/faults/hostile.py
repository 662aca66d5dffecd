"""Bytes that no well-meant peer sends, on all listeners of a running conductor, while others are served.

Noise, a node's messages and frames of HTTP/2 with everything wrong, floods of frames that cost their
sender nothing, bodies up to the limit, and connections that say half a thing and wait. Counted is what
the others saw; measured is the memory and the descriptors of the conductor's process.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable
from typing import Any

from bench.faults.asking import Clients, drawn_prompts
from bench.faults.cluster import FaultCluster, wait_until
from bench.faults.kills import counts, with_cluster
from bench.faults.soak import sample

SHAPE = ((40, 160), 8)
SLOW_CONNECTIONS = 300
"""The number of connections to each listener that are open at once and silent."""
CLOSES_WITHIN_S = 15.0
"""The seconds within which silent connections must be closed; the conductor ends them after 10 s."""
READ_S = 0.05
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
BODY_BYTES = 8 << 20
ROUND = 500


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """Return a frame of HTTP/2; `length`: what its head claims."""
    size = len(payload) if length is None else length
    return size.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


SETTINGS = PREFACE + frame(4, 0, 0, b"")


def _noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(1, 4_000))


def _random_frames(rng: random.Random) -> bytes:
    def one() -> bytes:
        payload = rng.randbytes(rng.randint(0, 60))
        claimed = None if rng.random() < 0.7 else rng.randrange(1 << 24)
        return frame(rng.randrange(12), rng.randrange(256), rng.randrange(1 << 32), payload, claimed)

    return SETTINGS + b"".join(one() for _ in range(rng.randint(1, 40)))


def _rapid_reset(rng: random.Random) -> bytes:
    headers = bytes.fromhex("8386418aa0e41d139d09b8f01e07")
    opened = (2 * number + 1 for number in range(200))
    return SETTINGS + b"".join(
        frame(1, 4, stream, headers) + frame(3, 0, stream, bytes(4)) for stream in opened
    )


def _continuation_flood(rng: random.Random) -> bytes:
    return SETTINGS + frame(1, 0, 1, b"\x82") + frame(9, 0, 1, rng.randbytes(1_000)) * 100


def _settings_flood(rng: random.Random) -> bytes:
    return SETTINGS + frame(4, 0, 0, bytes(6)) * 2_000


def _pings(rng: random.Random) -> bytes:
    return SETTINGS + frame(6, 0, 0, bytes(8)) * 2_000


def _zero_windows(rng: random.Random) -> bytes:
    return SETTINGS + frame(8, 0, rng.randrange(3), bytes(4)) * 100


def _header_bomb(rng: random.Random) -> bytes:
    """One entry of 4 KiB in HPACK's table, then references to it."""
    entry = b"\x40\x01a\x7f\x81\x1f" + b"x" * 4_000
    return SETTINGS + frame(1, 4, 1, entry + b"\xbe" * 12_000)


def _http_head(rng: random.Random) -> bytes:
    path = rng.choice(
        (b"/v1/chat/completions", b"/tokenize", b"/health", b"/" + rng.randbytes(9).hex().encode())
    )
    lines = [b"POST " + path + b" HTTP/1.1", b"Host: x", b"Content-Length: %d" % rng.choice((5, -1, 1 << 40))]
    lines += [rng.randbytes(rng.randint(1, 30)) for _ in range(rng.randint(0, 5))]
    return b"\r\n".join(lines) + b"\r\n\r\n" + _noise(rng)


def _large_body(rng: random.Random) -> bytes:
    """A body of eight MiB of brackets: the longest that is read."""
    if rng.random() > 0.02:
        return _http_head(rng)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % BODY_BYTES
    return head + rng.choice((b"[", b'{"a":', b"9", b" ")).ljust(8, b"[") * (BODY_BYTES // 8)


def _node_messages(rng: random.Random) -> bytes:
    """Return what begins like a node's stream: lengths that are true, empty or far too large, and noise."""
    said = b""
    for _ in range(rng.randint(1, 50)):
        noise = rng.randbytes(rng.choice((0, 1, 40, 3000)))
        size = rng.choice((len(noise), 0, (64 << 10) + 1, 2**32 - 1))
        said += size.to_bytes(4, "little") + noise
    return said


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    _noise,
    _node_messages,
    _random_frames,
    _rapid_reset,
    _continuation_flood,
    _settings_flood,
    _pings,
    _zero_windows,
    _header_bomb,
    _http_head,
    _large_body,
)


def _sent(port: int, data: bytes) -> None:
    """Send, take what comes for a moment, and go."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as peer:
        peer.settimeout(5)
        peer.sendall(data)
        peer.settimeout(READ_S)
        peer.recv(1 << 16)


def _slow_connections(ports: list[int]) -> float:
    """Open many that say half a thing; return after how many seconds all were closed by the conductor."""
    begin_s = time.monotonic()
    opened = []
    for port in ports:
        for number in range(SLOW_CONNECTIONS):
            peer = socket.create_connection(("127.0.0.1", port), 5)
            peer.sendall((b"", PREFACE[:9], b"POST /v1/comp")[number % 3])
            opened.append(peer)
    for peer in opened:
        peer.settimeout(CLOSES_WITHIN_S)
        with contextlib.suppress(ConnectionError):
            while peer.recv(1 << 12):
                pass
        peer.close()
    return time.monotonic() - begin_s


def _hostile(cluster: FaultCluster, count: int) -> dict[str, Any]:
    rng = random.Random(count)
    ports = [cluster.http_port, int(cluster.grpc_address.rpartition(":")[2]), cluster.attach_port]
    pid = cluster.conductor.pid() or 0
    clients = Clients(cluster.grpc_address, drawn_prompts(rng, 24, *SHAPE), rng, 2)
    rss_mib, injected = [], 0
    try:
        while injected < count:
            asked = clients.begin()
            for _ in range(min(ROUND, count - injected)):
                _sent(rng.choice(ports), rng.choice(KINDS)(rng))
                injected += 1
            clients.finish(asked)
            rss_mib.append(round(sample(pid, 0).rss_mib, 1))
            print(f"{injected}: {rss_mib[-1]} MiB, {clients.seen}", flush=True)
        num_fds = sample(pid, 0).num_fds
        asked = clients.begin()
        slow_s = _slow_connections(ports)
        clients.finish(asked)
        wait_until(lambda: sample(pid, 0).num_fds <= num_fds, CLOSES_WITHIN_S)
        return {
            "injected": injected,
            "slow_connections": SLOW_CONNECTIONS * len(ports),
            "slow_closed_after_s": round(slow_s, 1),
            "is_the_same_process": cluster.conductor.pid() == pid,
            "rss_mib": [*rss_mib, round(sample(pid, 0).rss_mib, 1)],
            **counts(clients),
        }
    finally:
        clients.close()


hostile_bytes = with_cluster(_hostile, prefill=1, decode=1)
