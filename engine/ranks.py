"""The processes that hold one model together: how they start, receive steps, and end.

Rank 0 is the engine. It starts the others and writes to the standard input of each: a line of JSON that says
what to load, then frames: a step, which is a row of int64, or a message, which means nothing here. Each
answers by a pipe of its own: that a step has run, or a message, and every `BEAT_S` that it lives. Nothing
else is to be agreed on, because all ranks build the same engine in the same order and wait for each other by
what a step sends and sums. The end of the first pipe, however it comes, ends a rank: no rank outlives its
engine, and none has to be asked. A rank that is silent is ended by force: its process stands still.

A collective over pickled objects was weighed: no pickle is read anywhere here, and a rank that waits in a
collective for a step that comes in an hour looks like a hung one.
"""

from __future__ import annotations

import io
import json
import logging
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from base.errors import LostError
from base.lifetime import spare_collector
from engine.arrivals import ArrivingBlocks
from engine.rank_group import GroupShape, RankGroup, join_group
from engine.runner import StepRunner

log = logging.getLogger(__name__)

END_S = 10.0
"""Time that a rank has to end by itself."""

BEAT_S = 10.0
"""Time between two signs of life that a rank gives, whatever else it does."""

MAX_MISSED_BEATS = 5
"""Signs of life that may fail to come in a row. They are waited for one by one: a machine that stood still
for a while has missed one."""

NUMBER_BYTES = 8

OnMessage = Callable[[bytes], None]


class PipeFrame(Enum):
    """The kinds of frames."""

    STEP = b"s"
    """Rank 0 sends numbers for `follow`."""
    RAN = b"r"
    """Another rank reports that it has run the next step, whose KV is in the cache."""
    MESSAGE = b"m"
    ALIVE = b"a"
    """Another rank gives a sign of life."""


class Pipe:
    """Frames over a pipe pair. Any thread may send; one receives."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._source = source
        self._sink = sink
        self._sending = threading.Lock()

    def send(self, kind: PipeFrame, payload: bytes = b"") -> None:
        """Raises OSError, or ValueError once it is closed: nobody is there any more."""
        with self._sending:
            self._sink.write(kind.value + len(payload).to_bytes(NUMBER_BYTES, "little") + payload)
            self._sink.flush()

    def receive(self) -> tuple[PipeFrame, bytes] | None:
        """Return the next frame; None: the other end is closed."""
        head = self._source.read(1 + NUMBER_BYTES)
        if len(head) < 1 + NUMBER_BYTES:
            return None
        size = int.from_bytes(head[1:], "little")
        payload = self._source.read(size)
        return (PipeFrame(head[:1]), payload) if len(payload) == size else None

    def close(self) -> None:
        # What was not flushed to a rank that has ended is nobody's loss.
        with suppress(OSError):
            self._sink.close()


class _Answers(io.FileIO):
    """The pipe by which a rank answers, which raises TimeoutError in a silence that `counts`."""

    def __init__(self, descriptor: int, counts: Callable[[], bool]) -> None:
        super().__init__(descriptor)
        self._counts = counts
        self._coming = select.poll()
        self._coming.register(descriptor, select.POLLIN)

    def readinto(self, buffer: Any) -> int | None:
        num_missed = 0
        while not self._coming.poll(1e3 * BEAT_S):
            # one that starts may load for minutes before it gives its first sign
            num_missed = num_missed + 1 if self._counts() else 0
            if num_missed >= MAX_MISSED_BEATS:
                raise TimeoutError(f"no sign of life for {num_missed * BEAT_S:.3g} s")
        return super().readinto(buffer)


class Ranks:
    """Owns the processes of the other ranks. `send_step` belongs to the device thread."""

    def __init__(self, shape: GroupShape) -> None:
        self.shape = shape
        self.num_sent_steps = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Pipe] = []
        self._changed = threading.Condition()
        self._num_ran = [0] * shape.size
        self._lost: int | None = None
        self._is_closing = False
        self.is_starting = True
        """True until whoever builds the engine says that it is built."""
        self._on_message: dict[int, OnMessage] = {}
        self._on_lost: Callable[[], None] = lambda: None
        self._on_step: Callable[[int, int], None] = lambda rank, step: None

    def start(self, module: str, call: dict[str, Any]) -> None:
        """Start `python -m module` for the next rank, and have it `join_ranks`."""
        source, sink = os.pipe()
        answers = io.BufferedReader(_Answers(source, lambda: not self.is_starting))
        try:
            # What it, or some library, prints goes to the log.
            process = subprocess.Popen(
                [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=2, pass_fds=[sink]
            )
        finally:
            os.close(sink)
        self._processes.append(process)
        assert process.stdin is not None
        pipe = Pipe(answers, process.stdin)
        self._pipes.append(pipe)
        rank = len(self._processes)
        process.stdin.write(json.dumps({"rank": rank, "answers": sink, **call}).encode() + b"\n")
        process.stdin.flush()
        threading.Thread(target=self._listen, args=(rank, pipe), name=f"rank-{rank}", daemon=True).start()

    def send_step(self, numbers: torch.Tensor, loads: Sequence[int] = ()) -> AbstractContextManager[None]:
        """Send a row of int64 to every other rank, for its `follow`, with the names of its loads.

        Rank 0's share runs in the body of what is returned. One that fails half done counts as a rank that
        has ended: the others would take what the next step sends and sums for this one's.

        Raises OSError or LostError if a rank has ended."""
        self._require_all()
        row = torch.cat([torch.tensor([len(loads), *loads]), numbers]).numpy().tobytes()
        self.num_sent_steps += 1
        self._on_step(0, self.num_sent_steps)
        for pipe in self._pipes:
            pipe.send(PipeFrame.STEP, row)
        return self._own_share()

    def wait_ran(self, ranks: list[int], step: int) -> None:
        """Block until those of `ranks` that are not rank 0 have run step number `step`.

        Raises LostError if a rank has ended."""
        others = [rank for rank in ranks if rank]
        with self._changed:
            self._changed.wait_for(
                lambda: self._lost is not None or all(self._num_ran[rank] >= step for rank in others)
            )
        self._require_all()

    def send(self, rank: int, message: bytes) -> None:
        """Send to one rank's `on_message`; raises LostError if it has ended."""
        try:
            self._pipes[rank - 1].send(PipeFrame.MESSAGE, message)
        except (OSError, ValueError) as error:
            raise LostError(f"rank {rank} of the engine has ended") from error

    def on_message(self, rank: int, listener: OnMessage) -> None:
        """Call `listener`, on some thread, with each message of `rank`."""
        self._on_message[rank] = listener

    def on_step(self, listener: Callable[[int, int], None]) -> None:
        """Call `listener`, on some thread, with a rank and the number of the step that it has run.

        A rank that does not report its steps never comes; rank 0 comes when a step is sent to all."""
        self._on_step = listener

    def on_lost(self, listener: Callable[[], None]) -> None:
        """Call `listener`, on some thread, when a rank ends that nobody asked to; at once if one has."""
        with self._changed:
            self._on_lost = listener
            is_lost = self._lost is not None
        if is_lost:
            listener()

    def pids(self) -> list[int]:
        """Return the other ranks' processes, in their order."""
        return [process.pid for process in self._processes]

    def close(self, grace_s: float = END_S) -> None:
        """End the other ranks, by force those that have not ended within `grace_s`."""
        self._is_closing = True
        killing = threading.Timer(grace_s, self._kill)
        killing.start()
        for pipe in self._pipes:
            pipe.close()  # which waits for what is being sent
        for process in self._processes:
            process.wait()
        killing.cancel()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _require_all(self) -> None:
        if self._lost is not None:
            raise LostError(f"rank {self._lost} of the engine has ended")

    @contextmanager
    def _own_share(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            log.critical("a step failed on rank 0", exc_info=error)
            self._lose(0)
            raise

    def _listen(self, rank: int, pipe: Pipe) -> None:
        try:
            while (frame := pipe.receive()) is not None:
                self._received(rank, *frame)
        except (ValueError, LookupError, OverflowError, MemoryError) as error:
            log.critical("what rank %s sent cannot be taken in", rank, exc_info=error)
        except TimeoutError as error:
            log.critical("rank %s: %s", rank, error)
        if not self._is_closing:
            self._lose(rank)

    def _received(self, rank: int, kind: PipeFrame, payload: bytes) -> None:
        if kind is PipeFrame.MESSAGE:
            self._on_message[rank](payload)
        elif kind is PipeFrame.RAN:
            with self._changed:
                self._num_ran[rank] += 1
                self._on_step(rank, self._num_ran[rank])
                self._changed.notify_all()

    def _lose(self, rank: int) -> None:
        with self._changed:
            is_first, self._lost = self._lost is None, rank
            self._changed.notify_all()
            listener = self._on_lost
        if self.is_starting:
            timer = threading.Timer(END_S, self._end_start)
            timer.daemon = True
            timer.start()
        elif is_first:
            self._kill()  # one that is stopped sees no end of its pipe, and keeps its memory
            listener()

    def _end_start(self) -> None:
        """End this process if it still waits for a rank that ended before the engine was built.

        It may be in a collective, out of which nothing else gets it before `TIMEOUT_S`."""
        if self.is_starting and not self._is_closing:
            log.critical("rank %s has ended before the engine was built", self._lost)
            os._exit(1)


def start_ranks(
    module: str, spec: dict[str, Any], shape: GroupShape, is_gpu: bool
) -> tuple[Ranks, RankGroup]:
    """Start the ranks from 1 on, join them as rank 0, and return when all are there.

    Each runs `python -m module`, which begins with `join_ranks`, to which `spec` goes as JSON. On GPUs, each
    has one, by number."""
    ranks = Ranks(shape)
    try:
        with tempfile.TemporaryDirectory() as folder:
            call = {"shape": asdict(shape), "folder": folder, "is_gpu": is_gpu, "spec": spec}
            for _ in range(1, shape.size):
                ranks.start(module, call)
            return ranks, join_group(0, shape, Path(folder), is_gpu)
    except BaseException:
        ranks.close(0.0)
        raise


def join_ranks() -> tuple[dict[str, Any], RankGroup, Pipe]:
    """Join as one of the other ranks; return the spec, the group and the pipe to rank 0."""
    spare_collector()
    # Ctrl-C is for rank 0, which ends us by ending the pipe.
    os.setpgid(0, 0)
    call = json.loads(sys.stdin.buffer.readline())
    os.set_inheritable(call["answers"], False)
    pipe = Pipe(sys.stdin.buffer, os.fdopen(call["answers"], "wb"))
    threading.Thread(target=_beat, args=(pipe,), name="beat", daemon=True).start()
    shape = GroupShape(**call["shape"])
    group = join_group(call["rank"], shape, Path(call["folder"]), call["is_gpu"])
    return call["spec"], group, pipe


def _beat(pipe: Pipe) -> None:
    """Give signs of life, though this process may be loading or waiting, and end it with rank 0's pipe."""
    rank_0 = select.poll()
    rank_0.register(sys.stdin, 0)  # a hang-up is always said
    with suppress(OSError):
        while not rank_0.poll(1e3 * BEAT_S):
            pipe.send(PipeFrame.ALIVE)
    os._exit(0)


def follow_steps(
    pipe: Pipe, device: torch.device, runner: StepRunner, on_message: OnMessage, arriving: ArrivingBlocks
) -> NoReturn:
    """Run the steps that rank 0 sends until its pipe ends; that is the end of the process.

    A step that fails ends it too: this rank's share of the cache is not what the others take it for, and rank
    0 learns of it by the end of the pipe.

    Args:
        device, runner: This rank's.
        on_message: Called with each message, whatever step runs, and before steps that were sent later.
        arriving: The loads that messages have begun.
    """

    def begin() -> None:
        # Which GPU is used is a thread's own matter.
        if device.type == "cuda":
            torch.cuda.set_device(device)

    running, waiting = (ThreadPoolExecutor(1, name, initializer=begin) for name in ("device", "ran"))

    def report(wait: Callable[[], None]) -> None:
        wait()
        pipe.send(PipeFrame.RAN)

    def run(payload: bytes) -> None:
        row = torch.frombuffer(bytearray(payload), dtype=torch.int64)
        begin = 1 + int(row[0])
        wait = runner.follow(row[begin:], arriving.of(row[1:begin].tolist()))
        if wait is not None:
            _or_end(waiting.submit(report, wait))

    _or_end(running.submit(runner.begin))
    while (frame := pipe.receive()) is not None:
        kind, payload = frame
        if kind is PipeFrame.STEP:
            _or_end(running.submit(run, payload))
        else:
            on_message(payload)
    # Without waiting for the device thread: it may wait for a rank that is gone.
    os._exit(0)


def _or_end(work: Future[None]) -> None:
    def look(done: Future[None]) -> None:
        if error := done.exception():
            log.critical("a step failed on this rank", exc_info=error)
            os._exit(1)

    work.add_done_callback(look)
