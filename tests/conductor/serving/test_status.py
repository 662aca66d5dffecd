"""GET /status says of each node what it told of itself."""

from types import SimpleNamespace

from base.lifetime import Lifetime
from base.messages import ExpertLoad
from base.request import Role
from conductor.serving.status import status
from tests.conductor.builders import make_heartbeat, make_info


def told(heartbeat) -> dict:
    info = make_info("decode-0", Role.DECODE)
    session = SimpleNamespace(info=info, last_heartbeat=heartbeat, num_requests=0)
    membership = SimpleNamespace(sessions=[session], in_control=lambda: True)
    view = SimpleNamespace(node=lambda node_id: SimpleNamespace(info=info))
    dispatcher = SimpleNamespace(is_ready=True, num_running=0, queue=())
    (node,) = status(dispatcher, membership, view, Lifetime())["nodes"]
    return node


def test_how_evenly_tokens_go_to_experts_is_told_where_there_are_any():
    assert "experts" not in told(None)
    assert "experts" not in told(make_heartbeat())
    load = ExpertLoad(800, 1.23456, 2.0, 1.1, (0.9, 1.1))
    assert told(make_heartbeat(experts=load))["experts"] == {
        "choices": 800,
        "busiest": 1.235,
        "busiest_of_a_layer": 2.0,
        "busiest_rank": 1.1,
        "ranks": [0.9, 1.1],
    }
