"""How the nodes of a cluster become more and fewer, with stand-ins for those who start and end them."""

import asyncio

import pytest

from base.config import GIB, ClusterConfig, PoolConfig
from base.errors import ConfigError
from base.request import Role
from deploy import plan, pools
from deploy.capacity import Offer
from deploy.change import Change, ChangeStoppedError
from deploy.launch import LaunchedProcess
from deploy.pools import NodePools

MODEL = plan.LocalModel("/nowhere", "m@1", "m")


class Hands:
    """Starts nodes that are ready when they are let go, and counts how many start at once."""

    def __init__(self):
        self.started = []
        self.ended = []
        self.known = []
        self.starting = 0
        self.most = 0
        self.let_go = asyncio.Semaphore(10_000)
        self.broken = ""

    async def launch_node(self, node):
        name = node.process.node_id
        self.started.append(name)
        self.starting += 1
        self.most = max(self.most, self.starting)
        try:
            await self.let_go.acquire()
            await asyncio.sleep(0)
        finally:
            self.starting -= 1
        if name == self.broken:
            raise RuntimeError(f"{name}: it ended before it was ready")
        return LaunchedProcess(name, {"node_id": name}, "h")

    async def end_node(self, name, grace_s):
        self.ended.append(name)

    async def nodes_changed(self, come):
        self.known += sorted(come)


@pytest.fixture
def roomy(monkeypatch):
    """A host with room for hundreds of nodes, and no Ray that could be asked."""
    offers = [Offer(10_000 * GIB, 500, 0)]
    monkeypatch.setattr(pools, "offer_of_host", lambda gpus: offers[-1])
    monkeypatch.setattr(pools, "free_resources", lambda: {"CPU": 1.0})
    monkeypatch.setattr(pools, "AT_ONCE", 2)
    return offers


async def made(hands, is_local=True, hosts="any", size=1):
    pool = PoolConfig(nodes=size)
    started = NodePools(
        ClusterConfig(hosts=hosts, prefill=pool, decode=pool), MODEL, ("h:1",), hands, is_local
    )
    await started.start(lambda text: None)
    return started


def changing(*said):
    said = []
    return Change("scale", said.append), said


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.usefixtures("roomy")
async def test_nodes_are_started_a_few_at_a_time_and_then_the_others_drained():
    hands = Hands()
    nodes = await made(hands, size=2)
    change, said = changing()
    await nodes.scale(9, 1, change)
    assert hands.most == 2
    assert set(nodes.ready) == {"decode-0", *(f"prefill-{number}" for number in range(9))}
    assert hands.known == sorted(f"prefill-{number}" for number in range(2, 9))
    assert hands.ended == ["decode-1"]
    assert said[-2:] == ["decode-1: draining", "decode-1: gone"]


async def test_what_does_not_fit_is_refused_before_anything_starts(roomy):
    hands = Hands()
    nodes = await made(hands)
    roomy.append(Offer(5 * GIB, 500, 0))
    change, _ = changing()
    with pytest.raises(
        ConfigError, match=r"prefill: at most 3 more fit in 5\.0 GiB of free memory, each takes 1\.4"
    ):
        await nodes.scale(999, None, change)
    with pytest.raises(ConfigError, match="at most 3 more"):
        await nodes.say_plan(999, None, change.say)
    assert len(hands.started) == 2


@pytest.mark.usefixtures("roomy")
async def test_a_dry_run_says_what_would_start_and_what_it_takes():
    hands = Hands()
    nodes = await made(hands, size=2)
    said = []
    await nodes.say_plan(3, 1, said.append)
    assert said == [
        "start, 2 at a time: prefill-2",
        "drain, one after the other: decode-1",
        "a prefill node takes 1.4 GiB (KV cache 1.0, process 0.4)",
        "a decode node takes 1.4 GiB (KV cache 1.0, process 0.4)",
        "this host has free: 10000.0 GiB of memory, 500 cores, 0 GPUs",
    ]
    assert len(hands.started) == 4
    assert hands.ended == []


@pytest.mark.usefixtures("roomy")
async def test_in_a_ray_that_is_joined_nodes_wait_for_hosts_and_that_is_said():
    nodes = await made(Hands(), is_local=False)
    change, said = changing()
    await nodes.scale(5, None, change)
    assert said[0] == "they take 4 CPU, of which Ray has 1 free: some wait for hosts"
    assert len(nodes.ready) == 6


@pytest.mark.usefixtures("roomy")
async def test_a_change_that_is_stopped_keeps_what_is_ready_and_ends_what_is_not():
    hands = Hands()
    nodes = await made(hands)
    hands.let_go = asyncio.Semaphore(3)
    change, _ = changing()
    scaling = asyncio.create_task(nodes.scale(99, None, change))
    await until(lambda: len(hands.started) == 2 + 5)
    change.stop("stopped, as its client was")
    told = r"stopped, as its client was: 3 of 98 nodes were started; there are prefill=4 decode=1 now"
    with pytest.raises(ChangeStoppedError, match=told):
        await scaling
    assert len(hands.started) == 2 + 5
    assert sorted(hands.ended) == sorted(set(hands.started) - set(nodes.ready))
    # gaps in the names are filled, and what is there stays
    hands.let_go = asyncio.Semaphore(99)
    before = set(nodes.ready)
    change, _ = changing()
    await nodes.scale(5, None, change)
    assert before < set(nodes.ready)
    assert len(nodes.ready) == 6


@pytest.mark.usefixtures("roomy")
async def test_nothing_is_removed_if_a_new_node_does_not_become_ready():
    hands = Hands()
    nodes = await made(hands, size=2)
    hands.broken = "prefill-2"
    change, _ = changing()
    with pytest.raises(RuntimeError, match="prefill-2: it ended"):
        await nodes.scale(9, 1, change)
    assert hands.ended == ["prefill-2"]
    assert "decode-1" in nodes.ready
    assert len(hands.started) < 2 + 9


@pytest.mark.usefixtures("roomy")
async def test_pairs_come_and_go_as_one():
    hands = Hands()
    nodes = await made(hands, hosts="together")
    hands.let_go = asyncio.Semaphore(1)  # one half of a pair becomes ready
    change, _ = changing()
    scaling = asyncio.create_task(nodes.scale(2, 2, change))
    await until(lambda: hands.let_go.locked() and hands.starting == 1)
    change.stop("stopped")
    with pytest.raises(ChangeStoppedError, match="prefill=1 decode=1 now"):
        await scaling
    assert sorted(hands.ended) == ["decode-1", "prefill-1"]


@pytest.mark.usefixtures("roomy")
async def test_a_restart_that_is_stopped_finishes_its_node_and_keeps_the_sizes():
    hands = Hands()
    nodes = await made(hands, size=2)
    change, said = changing()

    def say(text):
        said.append(text)
        if text == "prefill-1: draining":
            change.stop("stopped")

    change.say = say
    with pytest.raises(ChangeStoppedError, match="stopped: 2 of 4 nodes were restarted"):
        await nodes.restart(change)
    assert said[-1] == "prefill-1: ready"
    assert set(nodes.ready) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}


@pytest.mark.usefixtures("roomy")
async def test_the_only_node_of_a_pool_is_stood_in_for_while_it_restarts():
    nodes = await made(Hands())
    change, said = changing()
    await nodes.restart(change)
    assert said.index("prefill-1: ready") < said.index("prefill-0: draining") < said.index("prefill-0: ready")
    assert set(nodes.ready) == {"prefill-0", "decode-0"}


@pytest.mark.parametrize(
    ("names", "size", "numbers"),
    [
        ([], 3, [0, 1, 2]),
        (["prefill-0", "decode-5"], 2, [0, 1]),
        (["prefill-0", "prefill-1", "prefill-3"], 3, [0, 1, 3]),
        (["prefill-0", "prefill-1", "prefill-3"], 4, [0, 1, 2, 3]),
        (["prefill-0", "prefill-1", "prefill-3"], 1, [0]),
        (["prefill-7"], 3, [0, 1, 7]),
        (["prefill-0"], 0, []),
    ],
)
def test_a_pool_keeps_the_nodes_it_has_and_fills_the_gaps(names, size, numbers):
    assert plan.node_numbers(names, Role.PREFILL, size) == numbers
