"""`python -m bench.hostile`: what the worst bodies cost a conductor, on HTTP and gRPC.

    python -m bench.hostile [--fuzz 2000] [--only WORD] [--json bench/results/hostile.json]

A conductor as it is deployed, with a context window of 131,072 tokens and stub nodes, is sent every body of
`hostile_bodies.py` and `hostile_messages.py`, and small ones that ask for much work. Measured are the longest
stall of its event loop and by how much its memory grew, in its own process (`hostile_server.py`). The worst
are then sent alone, each to a fresh conductor three times, and the least of these counts: the machine is
shared. For the same reason `loop_ms`, the processor time of the loop's thread, and `own_ms`, which counts
other threads of the process that held it up, are reported beside the lateness by the clock.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.about_run import about_run, write_result
from bench.frontend_live import quick_profile
from bench.hostile_bodies import Body, filled, fillings_of, http_sites, let_by
from bench.hostile_grammars import grammar_bodies
from bench.hostile_messages import MESSAGE_FILLINGS, fields_let_by, grpc_sites, message
from bench.hostile_sending import Sender
from bench.hostile_server import Watch
from bench.hostile_small import small_bodies
from bench.hostile_turns import hostile_turns
from bench.stub_cluster import stub_cluster

MAX_BODY_BYTES = 8 << 20
WINDOW = 131_072
MAX_STALL_MS = 50.0
MAX_GROWTH = 10.0
LEAST_BYTES = 2 << 20
"""A shorter body counts as one of this length: what any may take, however short it is, is ten times that."""
WORST = 10
AGAIN = 3


@dataclass(frozen=True, slots=True)
class Found:
    """What a body cost."""

    path: str
    name: str
    num_bytes: int
    answer: str
    own_ms: float
    loop_ms: float
    late_ms: float
    busy_ms: float
    growth_bytes: int
    answer_bytes: int

    @property
    def growth(self) -> float:
        """Memory as a multiple of the body, and of the answer that it asked for."""
        return self.growth_bytes / max(LEAST_BYTES, self.num_bytes + self.answer_bytes)

    @property
    def badness(self) -> float:
        """Above 1: over a bar."""
        return max(self.own_ms / MAX_STALL_MS, self.loop_ms / MAX_STALL_MS, self.growth / MAX_GROWTH)


def generated() -> Iterator[Body]:
    """Yield the bodies of both walks."""
    for site in http_sites():
        for filling in fillings_of(site):
            sizes = {MAX_BODY_BYTES: "limit", let_by(filling, MAX_BODY_BYTES): "let by"}
            for size, word in sizes.items():
                if size is not None:
                    name = f"{site.name}: {filling.name}, {word}"
                    yield Body(site.path, name, lambda s=site, f=filling, n=size: filled(s, f, n))  # type: ignore[misc]
    for place in grpc_sites():
        for kind in MESSAGE_FILLINGS:
            sizes = {MAX_BODY_BYTES: "limit", fields_let_by(place, kind, MAX_BODY_BYTES): "let by"}
            for size, word in sizes.items():
                if size is not None:
                    name = f"{place.name}: {kind}, {word}"
                    make = lambda p=place, k=kind, n=size: message(p, k, n)  # noqa: E731
                    yield Body(place.path, name, make, place.is_stream)


def all_bodies() -> Iterator[Body]:
    """Yield the bodies that are not drawn."""
    yield from small_bodies()
    yield from grammar_bodies()
    yield from hostile_turns()
    yield from generated()


def drawn(count: int, seed: int) -> Iterator[Body]:
    """Yield bodies of several fillings at random places, some with noise in them."""
    rng = random.Random(seed)
    sites, places = list(http_sites()), list(grpc_sites())
    for number in range(count):
        size = min(MAX_BODY_BYTES, int(2 ** rng.uniform(8, 23.2)))
        if rng.random() < 0.5:
            site = rng.choice(sites)
            filling = rng.choice(fillings_of(site))
            data, path, is_stream = filled(site, filling, size), site.path, False
            name = f"{site.name}: {filling.name}"
        else:
            place, kind = rng.choice(places), rng.choice(list(MESSAGE_FILLINGS))
            data, path, is_stream = message(place, kind, max(size, 512)), place.path, place.is_stream
            name = f"{place.name}: {kind}"
        if rng.random() < 0.4:
            data = noisy(rng, data)
        yield Body(path, f"fuzz {number}, {name}", lambda data=data: data, is_stream)  # type: ignore[misc]


def noisy(rng: random.Random, data: bytes) -> bytes:
    """Return `data` with some bytes changed, and parts of it left out or twice."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(changed) + 1)
        end = min(len(changed), at + rng.randint(1, 1 << rng.randrange(20)))
        if rng.random() < 0.5:
            changed[at:end] = changed[end : 2 * end - at]
        else:
            changed[at:at] = rng.choice((b",", b'"', b"[", b"{", b"\\", b"]", b"}", b"0", rng.randbytes(4)))
    return bytes(changed[:MAX_BODY_BYTES])


class Measuring:
    """One conductor, and what bodies cost it."""

    def __init__(self, watch: Watch, sender: Sender) -> None:
        self._watch = watch
        self._sender = sender

    def measured(self, body: Body) -> Found:
        data = body.make()
        self._watch.begin()
        answer, answer_bytes = self._sender.send(body.path, data, body.is_message, body.is_stream)
        stalls, growth_bytes = self._watch.end()
        return Found(
            path=body.path,
            name=body.name,
            num_bytes=len(data),
            answer=answer,
            own_ms=round(stalls.own_ms, 1),
            loop_ms=round(stalls.loop_ms, 1),
            late_ms=round(stalls.late_ms, 1),
            busy_ms=round(stalls.busy_ms, 1),
            growth_bytes=growth_bytes,
            answer_bytes=answer_bytes,
        )


def measured(bodies: Iterator[Body], show_above: float) -> list[tuple[Body, Found]]:
    """Send all to one conductor; print what is above a share of a bar."""
    found = []
    with (
        stub_cluster(quick_profile(), 1, 1, module="bench.hostile_server", max_model_len=WINDOW) as cluster,
        closing(Watch(cluster.conductor_pid, cluster.folder)) as watch,
        closing(Sender(cluster.http_port, cluster.grpc_address)) as sender,
    ):
        sender.wait_ready()
        measuring = Measuring(watch, sender)
        for body in bodies:
            one = measuring.measured(body)
            found.append((body, one))
            if one.badness > show_above:
                print(shown(one), flush=True)
    return found


def alone(body: Body) -> Found:
    """Return the least that a body costs a fresh conductor, of some times."""
    return min((measured(iter([body]), 9e9)[0][1] for _ in range(AGAIN)), key=lambda found: found.badness)


def shown(found: Found) -> str:
    return (
        f"{found.own_ms:6.1f} ms (loop {found.loop_ms:6.1f}, late {found.late_ms:6.1f}, "
        f"in all {found.busy_ms:7.1f}) "
        f"{found.growth_bytes / 2**20:7.1f} MiB {found.growth:5.1f}x  {found.num_bytes:9,} bytes "
        f"{found.answer:12} {found.path.rpartition('/')[2]} {found.name}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.hostile", description=__doc__)
    parser.add_argument("--fuzz", type=int, default=0, help="so many random bodies instead")
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--only", default="", help="those with this word in path or name")
    parser.add_argument("--every", type=int, default=1, help="one of so many")
    parser.add_argument("--show", type=float, default=0.8, help="print what is above so much of a bar")
    parser.add_argument("--json", type=Path, help="a part of it is changed, named for what was run")
    options = parser.parse_args()
    about = about_run("grpcio", "protobuf", "pydantic", "tokenizers", "uvloop")
    bodies = drawn(options.fuzz, options.seed) if options.fuzz else all_bodies()
    asked = (body for body in bodies if options.only in f"{body.path} {body.name}")
    found = measured((body for at, body in enumerate(asked) if at % options.every == 0), options.show)
    ranked = sorted(found, key=lambda pair: -pair[1].badness)
    again = [alone(body) for body, one in ranked[:WORST]]
    print(f"{len(found)} bodies; the worst, alone:")
    for one in again:
        print(shown(one))
    if options.json:
        table = json.loads(options.json.read_text()) if options.json.exists() else {}
        table[f"fuzz {options.fuzz}" if options.fuzz else "generated"] = {
            "about": about,
            "command": f"python -m bench.hostile --fuzz {options.fuzz} --every {options.every}",
            "bodies": len(found),
            "over_50_ms_or_10x_alone": sum(one.badness > 1 for one in again),
            "worst_alone": [asdict(one) | {"growth": round(one.growth, 1)} for one in again],
            "worst_among_all": [asdict(one) | {"growth": round(one.growth, 1)} for _, one in ranked[:WORST]],
        }
        write_result(options.json, table)


if __name__ == "__main__":
    main()
