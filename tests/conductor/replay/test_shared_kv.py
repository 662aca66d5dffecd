"""Blocks that simulated sequences share, beside the pool of a live node, and what replay makes of them."""

import random
from dataclasses import dataclass, replace

import pytest

from base.request import Slo
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.profiles.reader import load_profile
from conductor.replay.cluster import SimCluster
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.events import Events
from conductor.replay.shared_kv import KvRun, SharedKv
from conductor.replay.sim_engine import SimEngine
from conductor.replay.sim_request import SimRequest
from conductor.replay.trace import TraceRequest
from engine.block_pool import BlockPool

COST = CostModel(load_profile("h200-llama8b"))
SIZE = 100
"""Tokens of a block."""


@dataclass(eq=False)
class Sequence:
    """One that holds blocks in a simulation and in a node's pool."""

    chain: tuple[int, ...]
    run: KvRun | None = None
    blocks: tuple[int, ...] = ()
    num_computed: int = 0


def chain_of(rng: random.Random, chains: list[tuple[int, ...]], fresh: list[int]) -> tuple[int, ...]:
    """Return a chain that goes on from a part of another one, or begins anew."""
    head = rng.choice(chains)[: rng.randrange(12)] if chains and rng.random() < 0.8 else ()
    own = tuple(fresh.pop() for _ in range(rng.randrange(1, 6)))
    chains.append(head + own)
    return chains[-1]


@pytest.mark.parametrize("seed", range(20))
def test_as_many_blocks_are_shared_as_in_the_pool_of_a_live_node(seed: int) -> None:
    rng = random.Random(seed)
    pool, shared = BlockPool(4_000), SharedKv(SIZE)
    holders: list[Sequence] = []
    chains: list[tuple[int, ...]] = []
    fresh, most = list(range(2_000)), 0
    for _ in range(300):
        unfinished = [each for each in holders if each.num_computed < len(each.chain)]
        what = rng.random()
        if what < 0.4:
            chain = rng.choice(chains) if chains and rng.random() < 0.3 else chain_of(rng, chains, fresh)
            matched = pool.match(chain)
            blocks = (*matched, *pool.allocate(len(chain) - len(matched)))
            holders.append(Sequence(chain, None, blocks, len(matched)))
            shared.hold(holders[-1], len(matched) * SIZE + rng.randrange(SIZE))
        elif what < 0.7 and unfinished:  # prompts are computed in the order in which they came
            first = unfinished[0]
            done, first.num_computed = first.num_computed, rng.randint(first.num_computed, len(first.chain))
            for at in range(done, first.num_computed):
                pool.publish(first.blocks[at], first.chain[at], first.chain[at - 1] if at else None)
        elif computed := [each for each in holders if each not in unfinished]:
            holders.remove(gone := rng.choice(computed))
            pool.release(gone.blocks)
            shared.release(gone)
        shared.check(holders)
        assert shared.tokens == pool.num_shared * SIZE
        most = max(most, pool.num_shared)
    assert most > 20
    for each in holders:
        shared.release(each)
    shared.check([])
    assert shared.tokens == 0


def test_what_is_held_is_found_up_to_where_a_chain_parts_from_it() -> None:
    shared = SharedKv(SIZE)
    first = Sequence((1, 2, 3, 4, 5))
    shared.hold(first, 0)
    assert shared.found((1, 2, 3, 9), 1_000) == 300
    assert shared.found((1, 2, 3, 9), 250) == 200
    assert shared.found((7, 8), 1_000) == shared.found((), 1_000) == 0
    shared.release(first)
    assert shared.found((1, 2, 3, 9), 1_000) == 0


def test_what_two_compute_at_once_is_held_twice() -> None:
    shared = SharedKv(SIZE)
    first, second, third = (Sequence((1, 2, 3)) for _ in range(3))
    shared.hold(first, 0)
    shared.hold(second, 100)
    assert shared.tokens == 100
    shared.hold(third, 300)
    assert shared.tokens == 400
    for each in (second, third, first):
        shared.release(each)
        shared.check(other for other in (first, second, third) if other.run)
    assert shared.tokens == 0


def decoding(contexts, capacity: int, until_s: float):
    """Return an engine in which sequences decode so many seconds: of each a chain, tokens, and steps."""
    events, ended = Events(), []
    cost = CostModel(replace(COST.profile, device_kv_tokens=capacity))
    node = SimEngine(
        cost, 0, events.at, lambda *_: 0.0, lambda *_: None, lambda request, now_s: ended.append(request)
    )
    node.shared = SharedKv(SIZE)
    for number, (chain, tokens, steps) in enumerate(contexts):
        request = SimRequest(TraceRequest(0.0, tokens, steps + 1, chain), number)
        request.order = 0.0, number
        events.at(0.0, node.join, request, 0.0)
    while events.moments and events.moments[0] <= until_s:
        events.run_next()
    return node, ended


ALIKE = tuple(range(9))


def test_two_who_share_a_prefix_fit_where_two_whole_contexts_do_not() -> None:
    apart, _ = decoding([((*range(10),), 1_000, 50), ((*range(20, 30),), 1_000, 50)], 1_400, 1e-3)
    assert (apart.batch, apart.num_waiting) == (1, 1)
    node, _ = decoding([((*ALIKE, 10), 1_000, 50), ((*ALIKE, 11), 1_000, 50)], 1_400, 1e-3)
    assert (node.batch, node.num_waiting) == (2, 0)
    assert node.shared.tokens == 900


def test_growth_has_the_room_that_shared_blocks_leave() -> None:
    contexts = [((*ALIKE, 10), 1_000, 300), ((*ALIKE, 11), 1_000, 300)]
    node, ended = decoding(contexts, 1_701, 1e9)
    assert (node.num_preemptions, len(ended)) == (0, 2)
    tight, ended = decoding(contexts, 1_600, 1e9)
    assert (tight.num_preemptions > 0, len(ended)) == (True, 2)
    assert node.shared.tokens == tight.shared.tokens == 0
    node.shared.check(ended)


def test_who_leaves_gives_back_what_nobody_else_holds() -> None:
    # the third needs what both hold: 900 are alike
    contexts = [((*ALIKE, 10), 1_000, 10), ((*ALIKE, 11), 1_000, 200), ((*range(20, 29),), 900, 10)]
    node, ended = decoding(contexts, 1_500, 0.5)
    assert [request.number for request in ended] == [0]
    assert (node.batch, node.num_waiting) == (1, 1)
    node, ended = decoding(contexts, 1_500, 1e9)
    assert [request.number for request in ended] == [0, 1, 2]


def test_a_dead_node_shares_nothing() -> None:
    node, _ = decoding([((*ALIKE, 10), 1_000, 50), ((*ALIKE, 11), 1_000, 50)], 1_400, 1e-3)
    left = node.evict_all(2e-3)
    node.shared.check(left)
    assert node.shared.tokens == 0


def agents(count: int) -> list[TraceRequest]:
    """Return so many requests that begin with the same 7,680 tokens and have 512 of their own."""
    return [TraceRequest(0.1 * at, 8_192, 400, (*range(15), 100 + at)) for at in range(count)]


def served(nodes: tuple[int, int], monkeypatch: pytest.MonkeyPatch, **options):
    """Return eight agents' cluster with room for two whole contexts a node, and what was reported to it."""
    beats, most = [], [0]
    taken_in, placed = ClusterView.heartbeat, ClusterView.placed

    def heartbeat(view, node_id, beat, now_s):
        beats.append(beat)
        return taken_in(view, node_id, beat, now_s)

    def place(view, *arguments):
        placed(view, *arguments)
        most[0] = max(most[0], *(node.decode_sequences for node in view.nodes()))

    monkeypatch.setattr(ClusterView, "heartbeat", heartbeat)
    monkeypatch.setattr(ClusterView, "placed", place)
    profile = replace(COST.profile, device_kv_tokens=20_480)
    chosen = ClusterOptions(*nodes, 512, settings=SchedulerSettings(roles_follow=False), slo=Slo(), **options)
    cluster = SimCluster(CostModel(profile), chosen)
    cluster.run(agents(8))
    assert cluster.outcomes.num_completed == 8
    for node in cluster.nodes:
        node.engine.shared.check([])
    return cluster, beats, most[0]


@pytest.mark.parametrize("conductors", [1, 2])
def test_a_node_reports_what_is_shared_and_placement_counts_it_as_free(monkeypatch, conductors) -> None:
    _, beats, most = served((1, 0), monkeypatch, conductors=conductors)
    assert most > 4, "two whole contexts fit"
    full = max(beats, key=lambda beat: beat.num_shared_blocks)
    assert full.num_shared_blocks % 15 == 0 < full.num_shared_blocks
    assert all(beat.num_free_blocks + beat.num_held_blocks in (39, 40) for beat in beats)
    # each has a block of its own, and grows by less than one
    assert full.num_held_blocks <= 15 + 2 * (full.num_shared_blocks // 15 + 1)


def test_a_decode_node_shares_what_it_held_when_a_request_was_placed(monkeypatch) -> None:
    cluster, beats, most = served((1, 1), monkeypatch, decode_caches=True)
    assert most > 2
    assert max(beat.num_shared_blocks for beat in beats) >= 30
    assert not sum(node.engine.num_preemptions for node in cluster.nodes)


def test_a_node_without_shared_blocks_reports_nothing_to_its_only_conductor(monkeypatch) -> None:
    beats = []
    monkeypatch.setattr(ClusterView, "heartbeat", lambda view, node_id, beat, now_s: beats.append(beat))
    rows = [row._replace(chain=range(16 * at, 16 * at + 16)) for at, row in enumerate(agents(8))]
    cluster = SimCluster(COST, ClusterOptions(1, 0, 512))
    cluster.run(rows)
    assert (cluster.outcomes.num_completed, beats) == (8, [])
