"""The test's end of `peer_process.py`: a real process that owns memory and gives grants."""

import asyncio
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from base.grants import Endpoint, Grant, Operation, PeerDescriptor

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Answers:
    """An answer that was not read yet."""

    peer: "RemotePeer"
    number: int

    async def get(self) -> dict:
        return await asyncio.to_thread(self.peer.wait_for, self.number)


class RemotePeer:
    """Owns the process."""

    def __init__(
        self, transports: tuple[str, ...], node_id: str = "peer", has_gpu: bool = False, reactors: int = 1
    ) -> None:
        epoch = str(secrets.randbits(63))
        command = [sys.executable, "-m", "tests.transfer.peer_process", ",".join(transports), epoch, node_id]
        command += ["gpu" if has_gpu else "host", str(reactors)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self._numbers = itertools.count()
        self._answers: dict[int, dict] = {}
        about = self.ask(do="describe")
        endpoints = tuple(Endpoint(*each) for each in about["endpoints"])
        self.descriptor = PeerDescriptor(
            about["node_id"], about["epoch"], endpoints, bytes.fromhex(about["secret"])
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def begin(self, **command: object) -> Answers:
        number = next(self._numbers)
        self._process.stdin.write(json.dumps({"id": number, **command}).encode() + b"\n")
        self._process.stdin.flush()
        return Answers(self, number)

    def ask(self, **command: object) -> dict:
        return self.wait_for(self.begin(**command).number)

    def wait_for(self, number: int) -> dict:
        while number not in self._answers:
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError("the peer process ended")
            answer = json.loads(line)
            self._answers[answer["id"]] = answer
        return self._answers.pop(number)

    def allocate(self, num_bytes: int) -> int:
        return self.ask(do="allocate", num_bytes=num_bytes)["segment_id"]

    def grant(
        self,
        segment_id: int,
        offsets: tuple[int, ...],
        length: int,
        operation: Operation = Operation.WRITE,
        lease_s: float = 600.0,
    ) -> Grant:
        answer = self.ask(
            do="grant",
            segment_id=segment_id,
            offsets=offsets,
            length=length,
            operation=operation.name,
            lease_s=lease_s,
        )
        return Grant(segment_id, answer["generation"], operation, offsets, length, lease_s)

    def checksum(self, segment_id: int, offset: int, length: int) -> int:
        return self.ask(do="checksum", segment_id=segment_id, offset=offset, length=length)["checksum"]

    def num_grants(self) -> int:
        return self.ask(do="count")["num_grants"]

    def freeze(self) -> None:
        """Stop the process where it stands; returns when it has stopped."""
        self.begin(do="freeze")
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
