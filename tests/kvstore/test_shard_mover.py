"""Blocks that several ranks share are stored whole, come back to any ranks, and never wrong."""

import asyncio
import itertools
import random
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from base.checksum import CHECKSUM_KIND, DEVICE_CHECKSUM_KIND, checksum, sum_of_words
from base.clock import SystemClock
from base.errors import LostError, TransferFailedError
from base.kv_layout import KvField, KvLayout, KvPart, all_of, part_columns, part_runs, spreads
from kvstore.block_mover import ShardMover, part_bytes
from kvstore.client import Stripes
from kvstore.eviction import BY_NAME
from kvstore.pool import HostPool
from kvstore.store import Store
from tests.engine.definitions import sum_words_definition
from tests.kvstore.cluster import chain_of
from tests.rank_caches import GROUPS, LAYOUT, RankedNode, random_blocks
from transfer.shard import NodeKv

CHAIN = chain_of("abcd")
SAVED = [3, 0, 5, 1]
"""Where the blocks of CHAIN are when they are saved."""


class TroubledShard:
    """A shard behind which something happens after each copy, or is raised."""

    def __init__(self, shard, after):
        self.part = shard.part
        self.sums = shard.sums
        self._shard = shard
        self._after = after

    async def write(self, move):
        await self._shard.write(move)
        self._after()

    async def read(self, move, on_arrived=None):
        await self._shard.read(move, on_arrived)
        self._after()


def once(error):
    """Return what raises `error` when it is called first."""
    errors = [error]

    def after():
        if errors:
            raise errors.pop()

    return after


@asynccontextmanager
async def running_store(agent, num_blocks=8):
    store = Store(agent, HostPool(num_blocks, BY_NAME["lru"], SystemClock()), LAYOUT.block_bytes)
    yield store
    assert store.pool.accounts().in_transfer == store.pool.accounts().held == 0
    store.check()
    await store.close()
    assert agent.num_grants == 0


@asynccontextmanager
async def one_node(group, kind=CHECKSUM_KIND):
    """A node whose ranks have random KV, its store and what is between them."""
    node = RankedNode(*GROUPS[group])
    async with node.running("node"), running_store(node.agents[0]) as store:
        node.store = store
        node.whole = random_blocks()
        for part, cache in zip(node.parts, node.caches, strict=True):
            cache.tensor.copy_(node.of(node.whole, part))
        node.mover = ShardMover(node.kv, store, node.agents[0].descriptor, kind)
        yield node


def forget(node):
    for cache in node.caches:
        cache.tensor.zero_()


def has(node, block_ids, expected):
    """Whether these blocks of a node's caches are those, of the whole."""
    pairs = zip(node.parts, node.caches, strict=True)
    return all(torch.equal(cache.tensor[block_ids], node.of(expected, part)) for part, cache in pairs)


def view(store, block_hash):
    begin = store.pool.record(block_hash).block_id * LAYOUT.block_bytes
    return store.segment.memory[begin : begin + LAYOUT.block_bytes]


@pytest.mark.parametrize("group", GROUPS)
async def test_a_stored_block_is_what_one_rank_would_store(group):
    async with one_node(group) as node:
        assert await node.mover.save(CHAIN, SAVED, 0, "") == 4
        for block_hash, block_id in zip(CHAIN, SAVED, strict=True):
            assert bytes(view(node.store, block_hash)) == node.whole[block_id].numpy().tobytes()
            assert node.store.pool.record(block_hash).checksum == checksum(view(node.store, block_hash))
        assert await node.mover.num_saved(CHAIN) == await node.mover.match(CHAIN) == 4


@pytest.mark.parametrize("group", GROUPS)
async def test_what_was_stored_comes_back_to_other_blocks(group):
    async with one_node(group) as node:
        await node.mover.save(CHAIN, SAVED, 0, "")
        forget(node)
        assert await node.mover.load(CHAIN, [4, 2, 0], 1, None) == 3
        assert has(node, [4, 2, 0], node.whole[SAVED[1:]])


async def test_blocks_that_steps_wait_for_come_layer_by_layer_to_each_rank():
    async with one_node("2 stages") as node:
        await node.mover.save(CHAIN, SAVED, 0, "")
        forget(node)
        had = []

        def on_arrived(num_parts):
            layers = (cache.tensor[SAVED].view(4, 2, -1) for cache in node.caches)
            first, second = (each.sum((0, 2)) > 0 for each in layers)
            had.append((num_parts, first.tolist(), second.tolist()))

        assert await node.mover.load(CHAIN, SAVED, 0, Stripes((1, 1), on_arrived)) == 4
        assert [(num_parts, first) for num_parts, first, _ in had] == [(1, [True, False]), (2, [True, True])]
        assert has(node, SAVED, node.whole[SAVED])


@pytest.mark.parametrize(("saver", "loader"), itertools.permutations(GROUPS, 2))
async def test_any_ranks_read_what_any_ranks_stored(saver, loader):
    async with one_node(saver) as node:
        await node.mover.save(CHAIN, SAVED, 0, "")
        other = RankedNode(*GROUPS[loader])
        async with other.running("other"):
            mover = ShardMover(other.kv, node.store, node.agents[0].descriptor, CHECKSUM_KIND)
            assert await mover.load(CHAIN, SAVED, 0, None) == 4
            assert has(other, SAVED, node.whole[SAVED])


def sum_as_gpus_do(node):
    """Let the shards take their sums as GPUs do: by the places of their words in whole blocks."""
    for shard, cache in zip(node.kv.shards, node.caches, strict=True):

        async def sums(block_ids, part, cache=cache, own=shard.part):
            columns = part_columns(cache.tensor, cache.layout, part.within(own))
            words = torch.cat(columns, dim=1).view(torch.int64)
            found, first = torch.zeros(len(block_ids), dtype=torch.int64), 0
            for places in (each.of_words(8) for each in spreads(LAYOUT, part)):
                count = places.num_bytes
                found += sum_words_definition(words, torch.tensor(block_ids), first, count, places)
                first += count
            assert first == words.shape[1]
            return [value & (1 << 64) - 1 for value in found.tolist()]

        shard.sums = sums


@pytest.mark.parametrize("group", GROUPS)
async def test_sums_that_ranks_take_as_gpus_do_add_up_to_a_blocks(group):
    async with one_node(group, DEVICE_CHECKSUM_KIND) as node:
        sum_as_gpus_do(node)
        assert await node.mover.save(CHAIN, SAVED, 0, "") == 4
        for block_hash in CHAIN:
            assert node.store.pool.record(block_hash).checksum == sum_of_words(view(node.store, block_hash))
        forget(node)
        assert await node.mover.load(CHAIN, SAVED, 0, None) == 4
        assert has(node, SAVED, node.whole[SAVED])
        view(node.store, CHAIN[2])[random.randrange(LAYOUT.block_bytes)] ^= 4
        assert await node.mover.load(CHAIN, SAVED, 0, None) == 2
        assert (node.store.num_damaged, await node.mover.match(CHAIN)) == (1, 2)


async def test_a_copy_of_what_has_no_heads_that_differs_from_another_ranks_is_refused():
    async with one_node("2 heads", DEVICE_CHECKSUM_KIND) as node:
        sum_as_gpus_do(node)
        await node.mover.save(CHAIN, SAVED, 0, "")
        headless = KvPart(0, 1, 0, 0)
        byte = next(each.start for each in spreads(node.caches[1].layout, headless) if each.run)

        def change():
            node.caches[1].tensor[SAVED[2], byte] ^= 1

        assert await troubled(node, 1, change, DEVICE_CHECKSUM_KIND).load(CHAIN, SAVED, 0, None) == 2
        assert await node.mover.load(CHAIN, SAVED, 0, None) == 4, "the record was right, and stays"


async def test_only_what_is_missing_is_written_and_only_whole_chains():
    async with one_node("2 x 2") as node:
        assert await node.mover.save(CHAIN[:2], SAVED[:2], 0, "") == 2
        assert await node.mover.save(CHAIN, SAVED[1:], 1, "") == 2
        assert await node.mover.save(CHAIN, SAVED, 0, "") == 0
        other = chain_of("xyz")
        assert await node.mover.save(other, [0], 2, "") == 0
        assert await node.mover.load(other, [0], 2, None) == 0


@pytest.mark.parametrize("damaged", range(4))
@pytest.mark.parametrize("group", ["2 stages", "2 heads", "2 x 2"])
async def test_a_record_that_is_hurt_is_refused_and_forgotten(group, damaged):
    async with one_node(group) as node:
        await node.mover.save(CHAIN, SAVED, 0, "")
        view(node.store, CHAIN[damaged])[random.randrange(LAYOUT.block_bytes)] ^= 4
        assert await node.mover.load(CHAIN, SAVED, 0, None) == damaged
        assert node.store.num_damaged == 1
        assert await node.mover.match(CHAIN) == damaged


def troubled(node, rank, after, kind=CHECKSUM_KIND):
    """Return a mover over the same shards, with trouble behind one of them."""
    shards = list(node.kv.shards)
    shards[rank] = TroubledShard(shards[rank], after)
    kv = NodeKv(LAYOUT, tuple(shards))
    return ShardMover(kv, node.store, node.agents[0].descriptor, kind)


@pytest.mark.parametrize("damaged", range(4))
async def test_a_block_that_did_not_arrive_as_it_was_made_is_not_stored(damaged, caplog):
    async with one_node("2 x 2") as node:

        def change():
            # Nothing has a name yet: the pool hands its blocks out in order.
            node.store.segment.memory[(damaged + 1) * LAYOUT.block_bytes - 1] ^= 1

        mover = troubled(node, 3, change)
        stored = await mover.save(CHAIN, SAVED, 0, "")
        assert stored == await mover.match(CHAIN) == damaged
        assert "did not arrive" in caplog.text
        for block_hash, block_id in zip(CHAIN[:stored], SAVED, strict=False):
            assert bytes(view(node.store, block_hash)) == node.whole[block_id].numpy().tobytes()


async def test_a_block_that_was_hurt_on_its_way_to_a_rank_is_refused_and_stays_stored():
    async with one_node("2 stages") as node:
        await node.mover.save(CHAIN, SAVED, 0, "")
        forget(node)

        def change():
            node.caches[1].tensor[SAVED[2], 0] += 1

        mover = troubled(node, 1, change)
        assert await mover.load(CHAIN, SAVED, 0, None) == 2
        assert (node.store.num_damaged, await mover.match(CHAIN)) == (0, 4)
        assert await node.mover.load(CHAIN, SAVED, 0, None) == 4


@pytest.mark.parametrize("rank", range(4))
async def test_a_rank_that_ends_while_it_saves_leaves_nothing(rank):
    async with one_node("2 x 2") as node:
        await node.mover.save(CHAIN[:1], SAVED[:1], 0, "")
        mover = troubled(node, rank, once(LostError("the rank has ended")))
        with pytest.raises(LostError):
            await mover.save(CHAIN, SAVED, 0, "")
        assert await mover.match(CHAIN) == 1
        assert node.store.pool.accounts().free == 7
        assert await mover.save(CHAIN, SAVED, 0, "") == 3


async def test_a_rank_that_cannot_read_fails_the_load_and_nothing_is_held():
    async with one_node("2 heads") as node:
        await node.mover.save(CHAIN, SAVED, 0, "")
        mover = troubled(node, 1, once(TransferFailedError("no end")))
        with pytest.raises(TransferFailedError):
            await mover.load(CHAIN, SAVED, 0, None)
        assert node.store.pool.accounts().held == 0
        assert await mover.load(CHAIN, SAVED, 0, None) == 4


@pytest.mark.parametrize("call", ["save", "load"])
async def test_a_call_that_is_cancelled_at_any_moment_leaves_nothing(call):
    async with one_node("2 x 2") as node:
        if call == "load":
            await node.mover.save(CHAIN, SAVED, 0, "")
        for num_turns in range(0, 60, 2):
            last = "" if call == "save" else None
            task = asyncio.ensure_future(getattr(node.mover, call)(CHAIN, SAVED, 0, last))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            books = node.store.pool.accounts()
            assert (books.in_transfer, books.held) == (0, 0)
            assert node.agents[0].num_grants == 0
            if call == "save":
                await node.store.delete(CHAIN)


def random_parts(rng, layout):
    """A grid of parts that has each layer's each head once, in any order."""
    layers = sorted(rng.sample(range(1, layout.num_layers), rng.randint(0, layout.num_layers - 1)))
    heads = sorted(rng.sample(range(1, layout.num_heads), rng.randint(0, layout.num_heads - 1)))
    layer_ends, head_ends = [0, *layers, layout.num_layers], [0, *heads, layout.num_heads]
    parts = [
        KvPart(first, end - first, head, head_end - head)
        for first, end in itertools.pairwise(layer_ends)
        for head, head_end in itertools.pairwise(head_ends)
    ]
    rng.shuffle(parts)
    return parts


@pytest.mark.parametrize("seed", range(60))
def test_parts_that_are_put_where_their_runs_say_are_the_whole(seed):
    """What `part_bytes` sums is what a rank has, and all ranks' runs together are each byte once."""
    rng = random.Random(seed)
    dtype = rng.choice(["float32", "bfloat16"])
    fields = [
        KvField("key", rng.choice([4, 8, 10]), dtype),
        KvField("value", rng.choice([4, 8, 10]), "float32"),
        KvField("latent", rng.choice([4, 8, 10]), dtype, has_heads=False),
        KvField("scale", 4, "float32", is_per_token=False),
    ]
    rng.shuffle(fields)
    layout = KvLayout(rng.randint(1, 5), rng.randint(1, 4), 16, tuple(fields[: rng.randint(1, 4)]))
    everything = all_of(layout)
    block = rng.randbytes(layout.block_bytes)
    built = np.zeros(layout.block_bytes, np.uint8)
    num_written = np.zeros(layout.block_bytes, np.int64)
    for part in random_parts(rng, layout):
        own = np.frombuffer(part_bytes(memoryview(block), layout, part), np.uint8)
        assert len(own) == part.of(layout).block_bytes
        first = 0
        for lies in spreads(layout, part):
            index = np.arange(lies.num_bytes)
            places = lies.start + lies.column + index // lies.run * lies.stride + index % lies.run
            assert np.array_equal(np.frombuffer(block, np.uint8)[places], own[first : first + len(index)])
            first += len(index)
        assert first == len(own)
        runs = part_runs(layout, part.share_for(everything), part, everything)
        for source, target, length in zip(
            runs.source_offsets, runs.target_offsets, runs.lengths, strict=True
        ):
            built[target : target + length] = own[source : source + length]
            num_written[target : target + length] += 1
    assert built.tobytes() == block
    assert (num_written == 1).all()
