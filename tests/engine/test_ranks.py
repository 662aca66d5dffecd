"""An engine of several ranks says what one says, token for token, and leaves no process behind."""

import asyncio
import fcntl
import json
import os
import queue
import random
import select
import signal
import subprocess
import sys
import termios
import threading
from array import array
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from base.clock import SystemClock
from base.config import EngineConfig
from base.errors import ConfigError, LostError
from base.request import FinishReason, SamplingParams
from engine.batch import batch_from_numbers, batch_numbers, build_batch
from engine.build import build_engine
from engine.rank_group import GroupShape
from engine.ranks import MAX_MISSED_BEATS, Pipe, PipeFrame, Ranks
from engine.ranks import _Answers as Answers
from engine.step import StepEntry, StepPlan
from tests.engine.builders import make_sequence, run_sequences
from tests.engine.test_gpu_model import make_family


def tokens_of(folder: Path, num_ranks: int) -> dict[str, list[int]]:
    """Run a dozen sequences, greedy and sampled, through more than their cache holds at once."""
    config = EngineConfig(
        device="cpu", block_size=16, kv_cache_gib=0.001, chunk_tokens=48, max_batch=6, threads=1,
        tensor_parallel=num_ranks,
    )  # fmt: skip
    engine = build_engine(config, str(folder), SystemClock(), rank_module="bench.built_rank")
    rng = random.Random(3)
    sequences = [
        make_sequence(
            f"{index:02}",
            [rng.randrange(211) for _ in range(rng.randint(1, 90))],
            20,
            sampling=SamplingParams(temperature=0.8 * (index % 2), seed=index),
        )
        for index in range(12)
    ]
    try:
        results = asyncio.run(run_sequences(engine.loop, sequences))
    finally:
        if engine.ranks is not None:
            engine.ranks.close()
            torch.distributed.destroy_process_group()
    return {name: [token.token_id for token in tokens] for name, tokens in results.items()}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_generate_the_tokens_of_one(num_ranks: int, tmp_path: Path) -> None:
    make_family("llama with all heads").save_pretrained(tmp_path)
    alone = tokens_of(tmp_path, 1)
    assert sum(len(tokens) for tokens in alone.values()) == 12 * 20
    assert tokens_of(tmp_path, num_ranks) == alone


@pytest.mark.full
def test_a_family_that_cannot_be_cut_is_refused_and_no_rank_is_left(tmp_path: Path) -> None:
    make_family("opt").save_pretrained(tmp_path)
    config = EngineConfig(device="cpu", kv_cache_gib=0.001, threads=1, tensor_parallel=2)
    try:
        with pytest.raises(ConfigError, match="no plan for this family"):
            build_engine(config, str(tmp_path), SystemClock(), rank_module="bench.built_rank")
    finally:
        torch.distributed.destroy_process_group()


def test_a_batch_survives_the_way_to_the_other_ranks() -> None:
    entries = (
        StepEntry(make_sequence("a", range(40)), 39, 1, (5, 6, 7), samples=True),
        StepEntry(make_sequence("b", range(30)), 10, 12, (1, 2), samples=False),
        StepEntry(make_sequence("c", range(9)), 0, 9, (0,), samples=True),
    )
    for plan in (StepPlan(entries, 1), StepPlan(entries[:1], 1), StepPlan(entries[1:], 0)):
        batch = build_batch(plan, 16, torch.device("cpu"))
        again = batch_from_numbers(batch_numbers(batch), torch.device("cpu"))
        for name in batch.views._fields:
            torch.testing.assert_close(getattr(again.views, name), getattr(batch.views, name), rtol=0, atol=0)
        assert again.shape == batch.shape
        assert batch.logit_rows.tolist() == [
            sum(entry.num_tokens for entry in plan.entries[: index + 1]) - 1
            for index, entry in enumerate(plan.entries)
            if entry.samples
        ]


def test_ranks_without_a_module_are_not_started(tmp_path: Path) -> None:
    make_family("llama with all heads").config.save_pretrained(tmp_path)
    config = EngineConfig(device="cpu", threads=1, tensor_parallel=2)
    with pytest.raises(ValueError, match="2 ranks need a rank_module"):
        build_engine(config, str(tmp_path), SystemClock())


def test_no_step_is_run_after_one_that_rank_0_left_half_done(tmp_path: Path) -> None:
    """The other ranks are in the middle of it, and would take the next step's sums for this one's."""
    make_family("llama with all heads").save_pretrained(tmp_path)
    config = EngineConfig(
        device="cpu", block_size=16, kv_cache_gib=0.001, chunk_tokens=48, threads=1, tensor_parallel=2
    )
    engine = build_engine(config, str(tmp_path), SystemClock(), rank_module="bench.built_rank")
    is_lost, num_layers = threading.Event(), 0

    def fail_in_the_second(module: torch.nn.Module, _: object) -> None:
        nonlocal num_layers
        num_layers += type(module).__name__ == "LlamaDecoderLayer"
        if num_layers == 2:
            raise MemoryError("no memory is left")

    async def ended(name: str) -> FinishReason | None:
        reasons = asyncio.Queue[FinishReason | None]()
        sequence = make_sequence(name, range(40), 1)
        engine.loop.add(sequence, lambda output: reasons.put_nowait(output.finish_reason))
        reason = await asyncio.wait_for(reasons.get(), 60)
        engine.loop.release(sequence)
        return reason

    async def run() -> list[FinishReason | None]:
        running = asyncio.create_task(engine.loop.run())
        reasons = [await ended("first"), await ended("second")]
        running.cancel()
        await asyncio.wait([running])
        return reasons

    assert engine.ranks is not None
    hook = torch.nn.modules.module.register_module_forward_pre_hook(fail_in_the_second)
    try:
        engine.ranks.on_lost(is_lost.set)
        assert asyncio.run(run()) == [FinishReason.ERROR, FinishReason.ERROR]
        assert is_lost.is_set()
        assert num_layers == 2
        assert engine.pool.num_held == 0
    finally:
        hook.remove()
        engine.ranks.close()
        torch.distributed.destroy_process_group()


def test_the_ranks_that_are_left_are_ended_after_one_has_ended_by_itself() -> None:
    ranks = Ranks(GroupShape(stages=3))
    lost = threading.Event()
    try:
        for _ in range(2):
            ranks.start("tests.engine.short_rank", {})
        ranks.is_starting = False
        ranks.on_lost(lost.set)
        assert lost.wait(60)
        with pytest.raises(LostError):
            ranks.wait_ran([1, 2], 1)
        with pytest.raises(LostError):
            ranks.send_step(torch.zeros(100, dtype=torch.int64))
    finally:
        ranks.close()
    for pid in ranks.pids():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_rank_that_sends_no_frames_counts_as_lost() -> None:
    ranks = Ranks(GroupShape(stages=2))
    lost = threading.Event()
    try:
        ranks.is_starting = False
        ranks.on_lost(lost.set)
        ranks.start("tests.engine.raving_rank", {})
        assert lost.wait(60)
        with pytest.raises(LostError):
            ranks.wait_ran([1], 1)
    finally:
        ranks.close()


def test_what_a_rank_prints_before_it_joins_goes_to_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(GroupShape(stages=2))
    answers = queue.SimpleQueue[bytes]()
    try:
        ranks.is_starting = False
        ranks.on_lost(lambda: answers.put(b"lost"))
        ranks.on_message(1, answers.put)
        ranks.start("tests.engine.printing_rank", {})
        assert answers.get(timeout=60) == b"joins"
        assert capfd.readouterr() == ("", "some library says hello\n")
    finally:
        ranks.close()


def test_a_rank_that_stands_still_is_lost_and_ended_though_no_step_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.ranks.BEAT_S", 0.05)
    ranks = Ranks(GroupShape(stages=3))
    lost = threading.Event()
    try:
        for _ in range(2):
            ranks.start("tests.engine.joining_rank", {})
        for pid in ranks.pids():
            os.kill(pid, signal.SIGSTOP)
        ranks.on_lost(lost.set)
        ranks.is_starting = False
        assert lost.wait(60)
        with pytest.raises(LostError):
            ranks.wait_ran([1], 1)
        for pid in ranks.pids():  # none keeps its memory
            assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT) is not None
    finally:
        ranks.close(0.0)


def test_the_silence_of_a_rank_that_starts_is_not_counted_once_it_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.ranks.BEAT_S", 0.01)
    misses = iter([False] * 7 + [True] * MAX_MISSED_BEATS)
    source, sink = os.pipe()
    answers = Answers(source, lambda: next(misses))
    try:
        with pytest.raises(TimeoutError, match="no sign of life"):
            answers.readinto(bytearray(1))
        assert list(misses) == []
    finally:
        answers.close()
        os.close(sink)


def test_a_rank_shows_that_it_lives_while_it_loads_and_waits(tmp_path: Path) -> None:
    source, sink = os.pipe()
    command = [sys.executable, "-m", "tests.engine.joining_rank", "0.01"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[sink]) as rank:
        os.close(sink)
        assert rank.stdin is not None
        pipe = Pipe(os.fdopen(source, "rb"), rank.stdin)
        try:
            shape = asdict(GroupShape(stages=2))
            call = {"rank": 1, "answers": sink, "shape": shape, "folder": str(tmp_path), "is_gpu": False}
            rank.stdin.write(json.dumps(call).encode() + b"\n")
            rank.stdin.flush()
            assert [pipe.receive() for _ in range(3)] == [(PipeFrame.ALIVE, b"")] * 3
        finally:
            pipe.close()
            rank.wait(60)


def test_ranks_that_do_not_end_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(GroupShape(stages=4))
    waits: list[float] = []
    wait = subprocess.Popen.wait

    def count(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        waits.append(timeout or 0.0)
        return wait(process, timeout)

    for _ in range(3):
        ranks.start("tests.engine.joining_rank", {})
    for pid in ranks.pids():
        os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(subprocess.Popen, "wait", count)
    ranks.close(0.5)
    assert sum(waits) <= 0.5
    for pid in ranks.pids():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_rank_that_takes_nothing_is_ended_while_somebody_sends_to_it() -> None:
    ranks = Ranks(GroupShape(stages=2))
    ranks.start("tests.engine.joining_rank", {})
    (pid,) = ranks.pids()

    def fill() -> None:
        with suppress(LostError):
            ranks.send(1, bytes(1 << 20))

    sending = threading.Thread(target=fill, daemon=True)
    closing = threading.Thread(target=ranks.close, args=(0.1,), daemon=True)
    os.kill(pid, signal.SIGSTOP)
    try:
        with open(f"/proc/{pid}/fd/0", "rb") as taken:
            sending.start()
            unread = array("i", [0])
            while unread[0] < 1 << 15:  # far more than the rank was given to begin with
                fcntl.ioctl(taken, termios.FIONREAD, unread)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        sending.join(60)
    assert not sending.is_alive()


@pytest.mark.full
def test_a_rank_whose_engine_is_killed_while_it_joins_ends_too(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from dataclasses import asdict\n"
        "from engine.rank_group import GroupShape\n"
        "from engine.ranks import Ranks\n"
        "ranks = Ranks(GroupShape(stages=2))\n"
        "call = {'shape': asdict(ranks.shape), 'folder': sys.argv[1], 'is_gpu': False}\n"
        "ranks.start('tests.engine.joining_rank', call)\n"
        "print(*ranks.pids(), flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        rank = os.pidfd_open(int(engine.stdout.readline()))
        engine.kill()
    ends = select.poll()
    ends.register(rank, select.POLLIN)
    try:
        assert ends.poll(60_000), "it waits for a rank that is gone"
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(rank, signal.SIGKILL)
        os.close(rank)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_stage_that_stalls_is_waited_for_as_long_as_any_rank() -> None:
    program = (
        "import torch\n"
        "import engine.rank_group\n"
        "engine.rank_group.TIMEOUT_S = 60.0\n"
        "from engine.ranks import start_ranks\n"
        "shape = engine.rank_group.GroupShape(stages=2)\n"
        "ranks, group = start_ranks('tests.engine.stalled_rank', {}, shape, False)\n"
        "try:\n"
        "    group.stage.take_in((1,), torch.float32)\n"
        "finally:\n"
        "    ranks.close(0.0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=240, check=False)
    assert done.returncode == 1
    assert b"Timed out waiting 60000ms" in done.stderr


@pytest.mark.full
def test_an_engine_whose_rank_ends_while_it_starts_does_not_wait_for_it() -> None:
    program = (
        "from engine.rank_group import GroupShape\n"
        "from engine.ranks import start_ranks\n"
        "start_ranks('tests.engine.short_rank', {}, GroupShape(stages=2), False)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=100, check=False)
    assert done.returncode == 1
    assert b"rank 1 has ended before the engine was built" in done.stderr
