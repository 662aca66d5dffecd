"""Every value survives the wire, and what no value could hold is refused."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from base.block_hash import BlockHash
from base.errors import ProtocolError
from base.grants import Endpoint, Grant, Operation, PeerDescriptor, RankGrant
from base.kv_layout import KvPart
from base.messages import (
    ExpertLoad,
    Failed,
    Granted,
    Heartbeat,
    KvEvents,
    Lend,
    Lent,
    NodeInfo,
    Prefill,
    Prefilled,
    PrefillTimes,
    Registered,
    Release,
    Reserve,
    Reserved,
    Serve,
    Source,
    Start,
    Tokens,
    Work,
)
from base.prompt_logprobs import PromptLogprobs
from base.request import (
    FinishReason,
    Grammar,
    GrammarKind,
    Pooling,
    Role,
    SampledToken,
    SamplingParams,
    StopParams,
    TokenLogprobs,
)
from base.step_budget import GapBounds
from base.step_cost import StepCost
from base.wire import (
    add_state,
    from_node,
    from_node_from,
    heartbeat_from,
    kv_events_from,
    lease_from,
    lease_to,
    register,
    register_from,
    to_node,
    to_node_from,
)
from protos import nodes_pb2 as pb

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
REALS = st.floats(allow_nan=False, allow_infinity=False)
HASHES = st.binary(min_size=16, max_size=16).map(BlockHash)
PEERS = st.builds(
    PeerDescriptor,
    st.text(),
    U64,
    st.lists(st.builds(Endpoint, st.text(), st.text())).map(tuple),
    st.binary(),
)
GRANTS = st.builds(
    Grant, U64, U64, st.sampled_from(Operation), st.lists(U64, max_size=5).map(tuple), U64, REALS
)
SAMPLING = st.builds(
    SamplingParams,
    temperature=REALS,
    top_k=U32,
    top_p=REALS,
    min_p=REALS,
    repetition_penalty=REALS,
    presence_penalty=REALS,
    frequency_penalty=REALS,
    seed=U64,
    logit_bias=st.lists(st.tuples(U32, REALS), max_size=3).map(tuple),
    grammar=st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), st.text()),
)
STOPS = st.builds(StopParams, st.integers(1, 2**31), U32, st.lists(U32, max_size=3).map(tuple))
TOKEN_IDS = st.lists(U32, min_size=3, max_size=20).map(tuple)
BOUNDS_S = st.floats(1e-9, 1e9) | st.just(inf)
WORK = st.builds(
    Work,
    request_id=st.text(),
    token_ids=TOKEN_IDS,
    num_prompt_tokens=st.integers(1, 3),
    chain_root=HASHES,
    sampling=SAMPLING,
    stop=STOPS,
    num_logprobs=st.none() | st.integers(0, 20),
    priority=st.integers(-5, 5),
    deadline_s=REALS,
    traceparent=st.text(),
    gap_bounds=st.builds(GapBounds, BOUNDS_S, BOUNDS_S),
)
LOGPROBS = st.builds(TokenLogprobs, REALS, st.lists(st.tuples(U32, REALS), max_size=3).map(tuple))
TOKENS = st.builds(SampledToken, U32, st.none() | LOGPROBS)
SOURCES = st.builds(Source, PEERS, GRANTS, st.lists(U64, max_size=4).map(tuple), U32)
REASONS = st.none() | st.sampled_from(FinishReason)
ROLES = st.frozensets(st.sampled_from(Role))
SUMS = st.lists(U64, max_size=4).map(tuple)
PART = st.builds(KvPart, U32, st.integers(1, 100), U32, st.integers(1, 100), st.booleans())
PARTS = st.lists(PART, max_size=2).map(tuple)
RANKS = st.lists(st.builds(RankGrant, PEERS, PART, GRANTS), max_size=2).map(tuple)
TOPS = st.none() | st.integers(0, 20)
SCORED = st.none() | st.just(PromptLogprobs(bytes(8), bytes(16), bytes(16)))
TIMES = st.builds(PrefillTimes, *[REALS] * 6, U32)
LOADS = st.none() | st.builds(
    ExpertLoad,
    U64,
    *[st.floats(0, allow_infinity=False)] * 3,
    st.lists(st.floats(0, allow_infinity=False), min_size=1, max_size=4).map(tuple),
)
NONE = st.none()
VECTORS = st.binary(min_size=1, max_size=4).map(lambda number: number * 4)


@given(
    st.one_of(
        st.builds(Reserve, WORK),
        st.builds(Prefill, WORK, st.none() | SOURCES, st.booleans(), TOPS, NONE),
        st.builds(Prefill, WORK, NONE, st.just(False), TOPS, st.sampled_from(Pooling)),
        st.builds(Granted, st.text(), U32, PEERS, st.none() | GRANTS, RANKS),
        st.builds(Lend, st.text(), st.lists(HASHES).map(tuple), REALS, U32),
        st.builds(Start, st.text(), U32, SUMS, PARTS),
        st.builds(Release, st.text()),
        st.builds(Serve, ROLES, U64),
    )
)
def test_a_message_to_a_node_arrives_as_it_was_sent(item):
    packed = to_node([item]).SerializeToString()
    assert to_node_from(pb.ConductorMessage.FromString(packed)) == [item]


@given(
    st.one_of(
        st.builds(Reserved, st.text(), U32, st.none() | GRANTS, RANKS),
        st.builds(
            Prefilled, st.text(), TOKENS, REASONS, U32, SUMS, TIMES, PARTS, st.booleans(), SCORED, NONE
        ),
        st.builds(
            Prefilled, st.text(), NONE, REASONS, U32, SUMS, TIMES, PARTS, st.just(False), SCORED, VECTORS
        ),
        st.builds(Lent, st.text(), GRANTS, SUMS),
        st.builds(Tokens, st.text(), st.lists(TOKENS, max_size=4).map(tuple), REASONS),
        st.builds(Failed, st.text(), st.text(), st.text()),
    ),
    st.builds(
        Heartbeat, U64, U32, U32, U32, U32, U64, U64, st.booleans(), ROLES, U64, U64, U32, U32, U32, LOADS
    ),
    st.builds(KvEvents, U64, st.booleans(), st.lists(HASHES).map(tuple), st.lists(HASHES).map(tuple)),
)
def test_a_message_from_a_node_arrives_as_it_was_sent(item, heartbeat, events):
    packed = from_node([item])
    add_state(packed, heartbeat, events)
    message = pb.NodeMessage.FromString(packed.SerializeToString())
    assert from_node_from(message) == [item]
    assert heartbeat_from(message) == heartbeat
    assert kv_events_from(message) == events


@given(PEERS, st.sets(st.sampled_from(Role)))
def test_a_registration_arrives_as_it_was_sent(peer, roles):
    node = NodeInfo(
        "n0", 7, frozenset(roles), "model", "layout", 4096, 100, 64, peer, "host", 7, "int8", 0.5, 640
    )
    assert register_from(pb.NodeMessage.FromString(register(node).SerializeToString())) == node


def test_a_lease_arrives_as_it_was_sent():
    assert lease_from(lease_to(Registered(10.0, 2.0, 3))) == Registered(10.0, 2.0, 3)
    cost = StepCost(
        1e-5, 1e-9, 0.004, 1e-5, 1e-8, 0.002, 0.001, 1e-5, 1e-9, 512, 1024, (128, 256), 0.01, 0.06
    )
    assert lease_from(lease_to(Registered(10.0, 2.0, 3, cost))) == Registered(10.0, 2.0, 3, cost)


def test_a_lease_with_costs_that_cannot_be_is_refused():
    with pytest.raises(ProtocolError, match="prefill_token_s"):
        lease_from(lease_to(Registered(10.0, 2.0, 3, StepCost(nan, 1e-9, 0.004, 1e-5, 1e-8))))


def test_failures_come_after_the_tokens_of_the_same_message():
    items = [Failed("r", "LostError", "x"), Tokens("r", (SampledToken(1),), None)]
    assert from_node_from(from_node(items)) == items[::-1]


def test_token_ids_travel_as_the_proto_file_says():
    (work,) = to_node_from(work_message())
    assert work.work.token_ids == (1, 2)
    packed = to_node([work]).reserve[0].work.token_ids
    assert packed == work_message().reserve[0].work.token_ids


def work_message(**change):
    work = {
        "token_ids": (1).to_bytes(4, "little") + (2).to_bytes(4, "little"),
        "num_prompt_tokens": 2,
        "chain_root": bytes(16),
        "stop": pb.StopParams(max_tokens=1),
    }
    return pb.ConductorMessage(reserve=[pb.Reserve(work=pb.Work(**work | change))])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (work_message(chain_root=bytes(15)), "chain_root"),
        (work_message(num_prompt_tokens=3), "num_prompt_tokens"),
        (work_message(num_prompt_tokens=0), "num_prompt_tokens"),
        (work_message(token_ids=bytes(7)), "token_ids"),
        (work_message(stop=pb.StopParams()), "max_tokens"),
        (work_message(gap_bounds=pb.GapBounds(mean_s=-1.0)), "gap_bounds"),
        (work_message(gap_bounds=pb.GapBounds(longest_s=0.02)), "gap_bounds"),
        (work_message(gap_bounds=pb.GapBounds(mean_s=nan, longest_s=1.0)), "gap_bounds"),
    ],
)
def test_work_that_cannot_be_is_refused_by_field(message, field):
    with pytest.raises(ProtocolError, match=field):
        to_node_from(message)


def test_what_a_node_cannot_say_is_refused_by_field():
    with pytest.raises(ProtocolError, match="Register"):
        register_from(pb.NodeMessage())
    with pytest.raises(ProtocolError, match=r"register\.roles"):
        register_from(pb.NodeMessage(register=pb.Register(node_id="n", roles=["cook"])))
    with pytest.raises(ProtocolError, match=r"register\.weights:"):
        register_from(pb.NodeMessage(register=pb.Register(node_id="n", weights="\n")))
    for error in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ProtocolError, match=r"register\.weights_error"):
            register_from(pb.NodeMessage(register=pb.Register(node_id="n", weights_error=error)))
    for load in (pb.ExpertLoad(busiest=float("nan"), ranks=[1.0]), pb.ExpertLoad(busiest=1.0)):
        with pytest.raises(ProtocolError, match=r"heartbeat\.experts"):
            heartbeat_from(pb.NodeMessage(heartbeat=pb.Heartbeat(experts=load)))
    times = pb.PrefillTimes(queue_s=float("nan"))
    with pytest.raises(ProtocolError, match=r"prefilled\.times: finite"):
        from_node_from(pb.NodeMessage(prefilled=[pb.Prefilled(times=times)]))
    with pytest.raises(ProtocolError, match="either a token or a vector"):
        from_node_from(pb.NodeMessage(prefilled=[pb.Prefilled()]))
    with pytest.raises(ProtocolError, match=r"prefilled\.embedding: 3 bytes"):
        from_node_from(pb.NodeMessage(prefilled=[pb.Prefilled(embedding=b"abc")]))
    with pytest.raises(ProtocolError, match="finish_reason"):
        from_node_from(pb.NodeMessage(tokens=[pb.Tokens(finish_reason="bored")]))
    with pytest.raises(ProtocolError, match="kv_events"):
        kv_events_from(pb.NodeMessage(kv_events=pb.KvEvents(stored=[b"short"])))
    with pytest.raises(ProtocolError, match="Registered"):
        lease_from(pb.ConductorMessage())
