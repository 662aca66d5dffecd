"""Small clusters for the conductor's tests."""

from base.messages import Heartbeat, NodeInfo
from base.request import NodeId, RequestId, Role, Slo
from conductor.placing.admission import TBT_HEADROOM
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.placement import Placement, PlacementRequest, Rejection
from conductor.profiles.reader import load_profile
from tests.conductor.scripted_node import node_info

BLOCK_SIZE = 512


def make_cost() -> CostModel:
    return CostModel(load_profile("a800-llama70b"))


def make_info(node_id: str, *roles: Role, num_blocks: int = 2_700, **fields) -> NodeInfo:
    told = {"max_model_len": 131_072, "block_size": BLOCK_SIZE, "num_blocks": num_blocks}
    return node_info(NodeId(node_id), roles, **told | fields)


def make_heartbeat(num_free_blocks: int = 2_700, **fields) -> Heartbeat:
    told = {"num_held_blocks": 0, "num_waiting": 0, "num_running": 0}
    told |= {"num_queued_tokens": 0, "num_context_tokens": 0}
    return Heartbeat(sequence=1, num_free_blocks=num_free_blocks, **told | fields)


def make_view(num_prefill: int = 2, num_decode: int = 2, cost: CostModel | None = None) -> ClusterView:
    view = ClusterView(cost or make_cost(), BLOCK_SIZE)
    for number in range(num_prefill):
        view.add_node(make_info(f"p{number}", Role.PREFILL), 0.0)
    for number in range(num_decode):
        view.add_node(make_info(f"d{number}", Role.DECODE), 0.0)
    return view


def make_request(
    request_id: str = "r",
    blocks: int = 10,
    first_block: int = 0,
    max_tokens: int = 300,
    slo: Slo | None = None,
) -> PlacementRequest:
    chain = range(first_block, first_block + blocks)
    return PlacementRequest(RequestId(request_id), chain, blocks * BLOCK_SIZE, max_tokens, slo or Slo())


def tbt_slo_for(step_s: float, cost: CostModel) -> float:
    """Return the bound on TBT under which a step may be predicted to take `step_s`."""
    empty_s = cost.decode_step_s(0, 0)
    return empty_s + (step_s - empty_s) / TBT_HEADROOM


def require_placement(result: Placement | Rejection) -> Placement:
    assert isinstance(result, Placement), result
    return result
