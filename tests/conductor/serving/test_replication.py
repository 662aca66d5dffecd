"""Replication while nodes come and go: a copy or drop of one that has left is nothing, the rest is done."""

import asyncio

import pytest

from base.clock import ManualClock
from base.messages import Forget, Lend
from base.request import NodeId, Role
from conductor.placing.replicas import Copy, Drop
from conductor.serving.membership import Membership
from conductor.serving.nodes import NodeSession
from conductor.serving.replication import Replication
from tests.conductor.builders import make_info, make_view

CHAIN = tuple(bytes([number]) * 16 for number in range(16))
EMPTY = 3
"""A slot whose node has left."""


class Told:
    """`Replicas` that wants what a test wants, once."""

    def __init__(self):
        self.todo = []

    def step(self, view, now_s):
        todo, self.todo = self.todo, []
        return todo


class Cluster:
    """Two prefill nodes that are attached, in slots 0 and 1; the view alone knows one in slot 2."""

    def __init__(self):
        clock, self.replicas = ManualClock(), Told()
        self.view = make_view(0, 0)
        self.membership = Membership("model", self.view, clock)
        self.sessions = [NodeSession(make_info(name, Role.PREFILL)) for name in ("p0", "p1")]
        for session in self.sessions:
            self.membership.join(session)
        for name in ("gone", "left"):
            self.view.add_node(make_info(name, Role.PREFILL), 0.0)
        self.view.remove_node(NodeId("left"))
        self.replication = Replication(self.replicas, self.view, self.membership, clock)

    def begin(self, *todo):
        self.replicas.todo = list(todo)
        return asyncio.ensure_future(self.replication.step())

    def sent(self, slot):
        return [type(item) for item in self.sessions[slot].take_outgoing()]


async def said(session):
    """Return what a node is told next."""
    async with asyncio.timeout(60):
        while not (items := session.take_outgoing()):
            await asyncio.sleep(0)
    return items


@pytest.mark.parametrize("slot", [2, EMPTY])
async def test_what_is_wanted_of_a_node_that_has_left_is_passed_over(slot):
    cluster = Cluster()
    await cluster.begin(Drop(CHAIN, slot), Copy(CHAIN, 0, slot, 1), Copy(CHAIN, 0, 0, slot), Drop(CHAIN, 1))
    assert cluster.sent(0) == []
    assert cluster.sent(1) == [Forget]


@pytest.mark.parametrize("leaving", [(0,), (1, 0), (0, 1)])
async def test_nodes_that_leave_end_their_copy_and_no_more(leaving):
    cluster = Cluster()
    step = cluster.begin(Copy(CHAIN, 0, 0, 1))
    assert await said(cluster.sessions[0])
    for slot in leaving:
        cluster.membership.leave(cluster.sessions[slot], "gone")
    await step
    assert step.exception() is None
    assert cluster.view.node_ids() == [NodeId(f"p{slot}") for slot in (0, 1) if slot not in leaving] + [
        "gone"
    ]


async def test_a_copy_begins_with_its_holders_promise():
    cluster = Cluster()
    step = cluster.begin(Copy(CHAIN, 3, 0, 1))
    (lend,) = await said(cluster.sessions[0])
    assert isinstance(lend, Lend)
    assert (lend.chain, lend.first_block) == (CHAIN, 3)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
