"""Role changes: only where one pool lacks and the other can spare, one at a time, with patience."""

from base.request import NodeId, Role
from conductor.placing.roles import RoleAction, RoleController, RoleSettings, RoleStep
from conductor.placing.scheduler import place
from tests.conductor.builders import make_cost, make_info, make_request, make_view, require_placement

COST = make_cost()
SETTINGS = RoleSettings(ttft_target_s=2.0, tbt_target_s=0.1, hold_s=10.0, pause_s=60.0, smoothing_s=1.0)


def overload_prefill(view, count: int = 30) -> None:
    for number in range(count):
        request = make_request(f"o{number}", blocks=20, first_block=100 * number, max_tokens=1)
        view.placed(request, require_placement(place(request, view, COST, 0.0)), 0.0)


def actions(controller, view, until_s: int, start_s: int = 0):
    found = []
    for now_s in range(start_s, until_s):
        action = controller.step(view, float(now_s))
        if action is not None:
            found.append((now_s, action))
    return found


def test_decode_node_is_drained_and_changes_when_prefill_is_overloaded() -> None:
    view = make_view(2, 4)
    overload_prefill(view)
    controller = RoleController(COST, SETTINGS)
    ((at_s, action),) = actions(controller, view, 40)
    assert at_s >= SETTINGS.hold_s
    assert (action.step, action.role) == (RoleStep.DRAIN, Role.PREFILL)
    view.set_draining(action.node_id, 40.0)
    for number in range(30):
        view.finished(make_request(f"o{number}").request_id, 40.0)
    change = controller.step(view, 41.0)
    assert change is not None
    assert (change.step, change.node_id) == (RoleStep.CHANGE, action.node_id)


def test_short_overload_changes_nothing() -> None:
    view = make_view(2, 4)
    overload_prefill(view)
    controller = RoleController(COST, SETTINGS)
    assert not actions(controller, view, 8)
    for number in range(30):
        view.finished(make_request(f"o{number}").request_id, 8.0)
    assert not actions(controller, view, 60, start_s=8)


def test_last_node_of_a_pool_stays() -> None:
    view = make_view(2, 1)
    overload_prefill(view)
    assert not actions(RoleController(COST, SETTINGS), view, 60)


def test_idle_cluster_stays_as_it_is() -> None:
    assert not actions(RoleController(COST, SETTINGS), make_view(3, 3), 100)


def test_node_that_dies_while_draining_ends_the_change() -> None:
    view = make_view(2, 4)
    overload_prefill(view)
    controller = RoleController(COST, SETTINGS)
    ((_, action),) = actions(controller, view, 30)
    view.remove_node(NodeId(action.node_id))
    assert controller.step(view, 31.0) is None
    # and another may begin
    assert actions(controller, view, 80, start_s=32)


def test_node_that_attaches_again_while_draining_ends_the_change() -> None:
    view = make_view(2, 4)
    overload_prefill(view)
    controller = RoleController(COST, SETTINGS)
    ((_, action),) = actions(controller, view, 30)
    view.add_node(make_info(action.node_id, Role.DECODE, epoch=2), 30.0)
    assert controller.step(view, 31.0) is None
    (_, again), *_ = actions(controller, view, 80, start_s=32)
    assert again.step is RoleStep.DRAIN


def test_node_whose_pool_is_lost_while_it_drains_stays_what_it_is() -> None:
    view = make_view(2, 2)
    overload_prefill(view)
    controller = RoleController(COST, SETTINGS)
    ((_, drain),) = actions(controller, view, 30)
    view.set_draining(drain.node_id, 30.0)
    (other,) = [node.info.node_id for node in view.nodes() if view.decode_mask >> node.slot & 1]
    view.remove_node(other)
    change = controller.step(view, 31.0)
    assert change == RoleAction(RoleStep.CHANGE, drain.node_id, Role.DECODE)
