"""The board between processes: who holds delays the owner, and the dead hold nothing."""

import asyncio
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from base.errors import LeaseExpiredError, ProtocolError, StaleError, TransferFailedError
from base.grants import Grant, Operation
from tests.transfer.descriptors import descriptors
from transfer.owned.board import Board, PeerBoard, _boot_id
from transfer.owned.grant import GrantState

ROOT = Path(__file__).parents[3]
EPOCH = 5
GRANT = Grant(1, 0xABC0000, Operation.WRITE, (0, 64), 64, 10.0)

# Holds the grant until its standard input ends.
HOLDER = f"""
import sys
from base.grants import Grant, Operation
from transfer.owned.board import PeerBoard
grant = Grant(1, {GRANT.generation}, Operation.WRITE, (0, 64), 64, 10.0)
with PeerBoard(sys.argv[1], {EPOCH}).held(grant):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def board() -> Iterator[Board]:
    owned = Board(EPOCH)
    owned.post(GRANT)
    yield owned
    owned.close()


@pytest.fixture
def holder(board: Board) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, board.address], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def draining(board: Board) -> threading.Event:
    board.close_slot(GRANT.generation, GrantState.REVOKED)
    done = threading.Event()
    board.drain(GRANT.generation, done.set)
    return done


def test_a_grant_that_nobody_holds_is_drained_at_once(board: Board) -> None:
    assert draining(board).is_set()


def test_a_copy_under_way_in_another_process_delays_the_owner_until_it_ends(
    board: Board, holder: subprocess.Popen
) -> None:
    done = draining(board)
    assert not done.is_set()
    holder.stdin.close()
    assert done.wait(60)


def test_a_writer_that_is_killed_delays_nobody(board: Board, holder: subprocess.Popen) -> None:
    done = draining(board)
    assert not done.is_set()
    holder.kill()
    assert done.wait(60)


def no_descriptor(_: int) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("lack", [(os, "dup", no_descriptor), (threading.Thread, "start", no_thread)])
async def test_an_owner_that_lacks_what_it_takes_to_wait_for_a_copy_waits_all_the_same(
    board: Board, monkeypatch, lack
) -> None:
    monkeypatch.setattr("transfer.owned.board.RETRY_S", 0.01)
    peer, done = PeerBoard(board.address, EPOCH), asyncio.Event()
    loop, before = asyncio.get_running_loop(), descriptors()
    peer.hold(GRANT)
    board.close_slot(GRANT.generation, GrantState.REVOKED)
    with monkeypatch.context() as patched:
        patched.setattr(*lack)
        board.drain(GRANT.generation, lambda: loop.call_soon_threadsafe(done.set))
    assert descriptors() == before
    assert not done.is_set()
    peer.let_go(GRANT)
    await asyncio.wait_for(done.wait(), 60)
    peer.close()


def test_two_holders_of_one_process_are_both_waited_for(board: Board) -> None:
    peer = PeerBoard(board.address, EPOCH)
    with peer.held(GRANT):
        with peer.held(GRANT):
            done = draining(board)
        assert not done.is_set()
    assert done.wait(60)
    peer.close()


def test_a_grant_that_ended_is_not_held_and_says_how_it_ended(board: Board) -> None:
    peer = PeerBoard(board.address, EPOCH)
    board.close_slot(GRANT.generation, GrantState.EXPIRED)
    with pytest.raises(LeaseExpiredError), peer.held(GRANT):
        pass
    board.post(replace(GRANT, generation=0xDEF0000))
    board.close_slot(0xDEF0000, GrantState.REVOKED)
    with pytest.raises(StaleError), peer.held(replace(GRANT, generation=0xDEF0000)):
        pass
    peer.close()


@pytest.mark.parametrize(
    "widened",
    [
        replace(GRANT, offsets=(0, 64, 128)),
        replace(GRANT, length=65),
        replace(GRANT, operation=Operation.READ),
    ],
)
def test_a_grant_that_says_more_than_was_posted_is_refused(board: Board, widened: Grant) -> None:
    peer = PeerBoard(board.address, EPOCH)
    with pytest.raises(ProtocolError), peer.held(widened):
        pass
    peer.close()


OURS = _boot_id()


@pytest.mark.parametrize(
    "address", ["", "a:b", "other-host:1:3", "x:y:z", f"{OURS}:1:x", f"{OURS}:x:1", f"{OURS}:{1 << 70}:1"]
)
def test_an_address_of_elsewhere_is_not_reached(address: str) -> None:
    with pytest.raises(TransferFailedError):
        PeerBoard(address, EPOCH)


def test_that_a_peer_is_on_another_host_is_known_without_a_look_at_files(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: pytest.fail(f"{path} was read again"))
    for _ in range(2):  # as with each batch
        with pytest.raises(TransferFailedError, match="another host"):
            PeerBoard("other-host:1:3", EPOCH)


def test_another_epoch_is_not_reached(board: Board) -> None:
    with pytest.raises(TransferFailedError):
        PeerBoard(board.address, EPOCH + 1)
