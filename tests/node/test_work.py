"""What a node shares among its conductors: one of them is in control, and each hears all news."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from base.messages import ExpertLoad, Prefill, Serve
from base.request import Role
from node.work import ConductorWork, Control, KvNews, SharedState
from prefill_node.role import PrefillRole
from tests.memory import kept_bytes
from tests.node_parts import parts, work

BOTH = frozenset(Role)
PREFILL = frozenset({Role.PREFILL})
STEPS = st.lists(st.tuples(st.sampled_from(["attached", "left"]), st.integers(1, 4)), max_size=30)


@given(STEPS)
def test_one_conductor_is_in_control_and_each_change_has_another_fence(steps):
    control = Control(BOTH)
    attached, holder, last = set(), None, 0
    for verb, epoch in steps:
        if (verb == "attached") == (epoch in attached):
            continue
        getattr(control, verb)(epoch)
        attached ^= {epoch}
        fences = {epoch: control.fence(epoch) for epoch in range(1, 5)}
        expected = min(attached, default=None)
        assert [epoch for epoch, fence in fences.items() if fence] == ([expected] if attached else [])
        if expected is not None:
            assert fences[expected] >= last
            assert expected == holder or fences[expected] > last
            last = fences[expected]
        holder = expected


def test_an_order_is_obeyed_only_from_the_one_in_control_and_under_its_present_fence():
    control = Control(BOTH)
    control.attached(7)
    first = control.fence(7)
    control.attached(3)
    assert not control.obey(7, Serve(PREFILL, first)), "an order from one that lost control"
    assert not control.obey(3, Serve(PREFILL, 0))
    assert control.obey(3, Serve(PREFILL, control.fence(3)))
    assert control.roles == PREFILL
    control.left(3)
    assert not control.obey(7, Serve(BOTH, first)), "an order from before"
    assert control.obey(7, Serve(BOTH, control.fence(7)))


@given(st.lists(st.tuples(st.sampled_from("abtAB"), st.integers(0, 3)), max_size=60))
def test_every_listener_ends_up_with_what_is_there(steps):
    here, stored, removed = set(), [], []

    def take():
        told = list(stored), list(removed)
        stored.clear()
        removed.clear()
        return told

    news = KvNews(take)
    known = {}

    def hear(listener):
        came, went = news.take(listener)
        if listener in known:
            assert not known[listener] & set(came), "told twice"
            assert set(went) <= known[listener], "forgot what it never knew"
            known[listener] = known[listener] - set(went) | set(came)
        else:
            assert (came, went) == ((), ())

    for verb, name in steps:
        if verb == "t":  # a block comes or goes; the cache tells the net change
            undone, done = (removed, stored) if name not in here else (stored, removed)
            if name in undone:
                undone.remove(name)
            else:
                done.append(name)
            here ^= {name}
        elif verb in "ab":
            hear(verb)
        elif verb.lower() in known:
            news.end(verb.lower())
            del known[verb.lower()]
        else:
            news.begin(verb.lower())
            known[verb.lower()] = set(here)
    for listener in list(known):
        hear(listener)
        assert known[listener] == here


async def test_a_heartbeat_says_what_the_last_step_was_made_of():
    async with parts(node=PrefillRole) as made:
        part = made["node"]
        load = ExpertLoad(8, 2.0, 2.0, 1.0, (1.0,))
        experts = SimpleNamespace(load=lambda: load)
        state = SharedState(SimpleNamespace(loop=part.loop, pool=part.pool, experts=experts), BOTH, None)
        other = SimpleNamespace(tasks=part.role.tasks)
        told = ConductorWork(state, lambda: None, part.role, other, other)
        beats = []
        part.loop.on_step(lambda plan, seconds, ended_at_s: beats.append(told.heartbeat()))
        part.role.prefill(Prefill(work(33, max_tokens=4), stays=True))
        await part.role.tasks.idle()
        last = told.heartbeat()
        held = [part.pool.match(part.pool.snapshot()) for _ in range(3)]
        assert told.heartbeat().num_shared_blocks == 2 * len(held[0]) > 0
    steps = [(beat.num_step_rows, beat.num_step_prompt_tokens) for beat in beats]
    assert steps[:5] == [(0, 16), (0, 16), (0, 1), (1, 0), (1, 0)], "chunks of 16, then a row a step"
    queued = [beat.num_queued_tokens for beat in beats[:5]]
    assert queued == [33, 17, 0, 0, 0], "the last token alone is no queue"
    assert {beat.step_budget_tokens for beat in beats} == {16}
    assert (last.num_step_rows, last.num_step_prompt_tokens) == (0, 0), "nothing runs any more"
    assert last.experts is load


class ChangingStore:
    """As much of a store as is reported of."""

    hashes = ()

    def __init__(self):
        self._listeners = []

    def __contains__(self, name):
        return False

    def on_change(self, listener):
        self._listeners.append(listener)

    def come_and_go(self, count):
        for number in range(count):
            for listener in self._listeners:
                listener([b"%016d" % number])


async def test_a_node_without_a_conductor_keeps_no_news_of_its_store():
    """Other nodes may have blocks come and go there for ever."""
    store = ChangingStore()
    async with parts(node=PrefillRole) as made:
        part = made["node"]
        engine = SimpleNamespace(loop=part.loop, pool=part.pool, experts=None)
        state = SharedState(engine, BOTH, store)
        _, num_bytes = kept_bytes(lambda: store.come_and_go(10_000), __file__)
        assert num_bytes < 10_000
        state.news.begin("conductor")
        store.come_and_go(1)
        assert state.news.take("conductor") == ((), (b"%016d" % 0,))
