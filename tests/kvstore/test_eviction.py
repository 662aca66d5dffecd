"""The order in which blocks go, on trees small enough to check by hand, and on random ones."""

import random
import weakref

import pytest

from base.config import EVICTION_POLICIES
from base.errors import CapacityError
from bench.hit_rate import OPEN_TRACE, hit_rate, insert_rest, prompts_of
from kvstore.admission import Admission
from kvstore.eviction import BY_NAME, Entry, Eviction, kept_while_it_may_return, length_aware, lfu, lru
from tests.effort import counting

needs_trace = pytest.mark.skipif(
    not OPEN_TRACE.exists(), reason="needs ../shared/traces/conversation_trace.jsonl"
)


class Name(str):
    """A block's name of which can be seen whether anybody has it."""


def tree(rank, *chains):
    """Each chain is one request: touch what is there, insert the rest."""
    cache = Eviction(rank)
    for chain in chains:
        use(cache, chain)
    return cache


def use(cache, chain):
    matched = [block for block in chain if block in cache]
    cache.touch(matched)
    for at in range(len(matched), len(chain)):
        cache.insert(chain[at], chain[at - 1] if at else None)


def drain(cache):
    return "".join(cache.victim() for _ in range(len(cache)))


def test_lru_evicts_the_stalest_chain_from_its_tail():
    assert drain(tree(lru, "abc", "xy")) == "cbayx"


def test_lru_keeps_a_shared_head_for_as_long_as_any_chain_needs_it():
    assert drain(tree(lru, "abc", "axy", "abc")) == "yxcba"


def test_lfu_evicts_the_chain_used_once_before_an_older_one_used_twice():
    assert drain(tree(lfu, "ab", "ab", "xy")) == "yxba"


def test_length_aware_evicts_the_deepest_of_those_used_equally_often():
    assert drain(tree(length_aware, "ab", "xyz")) == "zbyax"


def test_a_block_used_again_outlives_newer_ones_by_its_patience_and_not_for_ever():
    admission = Admission()
    admission.patience = 3.0
    cache = Eviction(kept_while_it_may_return, admission)
    for block in "aab":
        use(cache, block)
    gone = cache.victim()
    for block in "cdef":
        use(cache, block)
        gone += cache.victim()
    assert gone == "bcade"


def test_the_end_that_the_next_turn_left_behind_goes_first():
    cache = Eviction(kept_while_it_may_return, Admission())
    for chain in ("xy", "abc", "abde"):
        use(cache, chain)
    assert cache.victim() == "c"
    assert drain(cache) == "yxedba"


def test_an_end_that_was_used_again_is_not_left_behind():
    cache = Eviction(kept_while_it_may_return, Admission())
    for chain in ("abc", "abde", "abc", "xy"):
        use(cache, chain)
    assert cache.victim() == "e"


def test_conversations_under_a_shared_head_do_not_end_each_other():
    cache = Eviction(kept_while_it_may_return, Admission())
    for chain in ("s", "sa", "sb", "x", "sc", "sd"):
        use(cache, chain)
    assert drain(cache) == "abxcds"


@pytest.mark.parametrize("make", BY_NAME.values(), ids=BY_NAME)
def test_a_held_block_keeps_all_before_it(make):
    cache = make()
    use(cache, "abc")
    cache.hold("b")
    assert cache.victim() == "c"
    with pytest.raises(CapacityError):
        cache.victim()
    cache.release("b")
    assert drain(cache) == "ba"


def test_a_block_cannot_come_in_without_the_one_before_it():
    cache = tree(lru, "a")
    with pytest.raises(KeyError):
        cache.insert("z", "y")
    assert list(cache) == ["a"]


def test_only_a_leaf_can_be_removed():
    cache = tree(lru, "ab")
    with pytest.raises(ValueError, match="leaf"):
        cache.remove("a")
    cache.remove("b")
    cache.remove("a")
    assert len(cache) == 0


def test_removing_without_evicting_does_not_let_the_order_grow():
    cache = Eviction(lru)
    for _ in range(1_000):
        cache.insert("a", None)
        cache.remove("a")
    cache.check()
    cache.insert("a", None)
    assert cache.victim() == "a"


def test_conversations_that_are_deleted_leave_nothing_of_their_ends():
    cache, gone = BY_NAME["admission"](), weakref.WeakSet()
    for turn in range(1_000):
        cache.insert("a", None)
        for end in Name(f"{turn} first"), Name(f"{turn} second"):
            gone.add(end)
            cache.insert(end, "a")
        for end in list(cache)[1:]:
            cache.remove(end)
        cache.remove("a")
    del end
    assert len(gone) < 100


def test_what_follows_a_block_is_found_in_one_look_at_each():
    """A damaged block is looked for in the event loop, and conversations are thousands of blocks long."""
    cache = Eviction(lru)
    for name in range(4_000):
        cache.insert(name, name - 1 if name % 1_000 else None)
    with counting() as effort:
        assert cache.subtree(1_500) == list(range(1_999, 1_499, -1))
    assert effort.lines < 20_000


@pytest.mark.parametrize("make", BY_NAME.values(), ids=BY_NAME)
@pytest.mark.parametrize("seed", range(10))
def test_random_histories_keep_every_chain_whole(make, seed):
    rng = random.Random(seed)
    cache, held = make(), []
    for _ in range(400):
        act = rng.random()
        if act < 0.6:
            path = tuple(rng.randrange(2) for _ in range(6))
            use(cache, [path[:length] for length in range(1, 7)])
        elif act < 0.7 and len(cache):
            held.append(rng.choice(list(cache)))
            cache.hold(held[-1])
        elif act < 0.8 and held:
            cache.release(held.pop(rng.randrange(len(held))))
        elif len(cache):
            try:
                gone = cache.victim()
            except CapacityError:
                assert held
            else:
                assert not any(block[: len(gone)] == gone for block in held)
        cache.check()
        assert all(block[:-1] in cache for block in cache if len(block) > 1)


def returning_conversations(num_conversations, gap, length=8):
    """Each conversation asks twice, `gap` conversations apart; half never come back."""
    for at in range(num_conversations):
        yield [("shared",), *[(at, depth) for depth in range(length)]]
        if at >= gap and at % 2:
            yield [("shared",), *[(at - gap, depth) for depth in range(length + 2)]]


def num_hits(policy, capacity, prompts):
    cache, hits = BY_NAME[policy](), 0
    for chain in prompts:
        matched = 0
        while matched < len(chain) and chain[matched] in cache:
            matched += 1
        hits += matched
        cache.touch(chain[:matched])
        insert_rest(cache, chain, matched, capacity)
    return hits


def test_admission_finds_conversations_again_where_lru_has_forgotten_all_of_them():
    prompts = list(returning_conversations(4_000, gap=100))
    assert num_hits("lru", 600, prompts) < 6_100  # the shared block alone
    assert num_hits("admission", 600, prompts) > 7_000


def test_admission_takes_everything_where_there_is_room():
    prompts = list(returning_conversations(2_000, gap=20))
    assert num_hits("admission", 1_000, prompts) >= 0.98 * num_hits("lru", 1_000, prompts)


def test_the_configuration_knows_the_policies_that_there_are():
    assert tuple(BY_NAME) == EVICTION_POLICIES


@needs_trace
@pytest.mark.full
def test_admission_beats_the_policies_of_the_paper_on_the_open_trace():
    capacity = 2_000
    prompts = prompts_of(OPEN_TRACE)[:4_000]
    best = max(hit_rate(prompts, name, capacity).blocks for name in ("lru", "lfu", "length_aware"))
    assert hit_rate(prompts, "admission", capacity).blocks > best


@needs_trace
def test_unlimited_hit_rate_of_the_open_trace_is_the_ideal_one():
    rate = hit_rate(prompts_of(OPEN_TRACE), "lru", 1_000_000)
    assert rate.tokens == pytest.approx(0.3736, abs=0.0005)
    assert rate.blocks == pytest.approx(0.3664, abs=0.0005)


def test_a_block_is_shown_without_the_chain_that_it_ends():
    last = None
    for number in range(5_000):
        last = Entry(number, last, number, 0)
    assert len(repr(last)) < 100
