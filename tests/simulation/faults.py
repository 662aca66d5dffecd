"""What is done to a simulated cluster: one function for each kind of deed."""

from __future__ import annotations

import asyncio

from base.messages import Serve
from base.request import Role
from conductor.placing.roles import OTHER


def carry_out(world, deed):
    """See that `deed` is done when it is due, and undone after its time."""
    world.loop.call_at(deed.at_s, _DEEDS[deed.kind], world, deed)


def _deed(function):
    def done(world, deed):
        world.trace("deed", deed.kind, *deed.where, round(deed.for_s, 3))
        world.num_losses += 1
        function(world, deed)

    return done


def _node(world, deed):
    return next(node for node in world.nodes if node.plan.name == deed.where[0])


@_deed
def _kill(world, deed):
    _end(world, deed, is_power_cut=False)


@_deed
def _cut_power(world, deed):
    # Nobody is told: a request that lost an attempt to it is placed on it once more where there is no other.
    world.num_losses += _is_alone(world, deed)
    _end(world, deed, is_power_cut=True)


def _is_alone(world, deed):
    """Whether a role of the node is nobody else's at the moment."""
    node = _node(world, deed)
    others = [_roles(other) for other in world.nodes if other is not node and other.is_up]
    return not _roles(node).issubset(frozenset().union(*others))


def _roles(node):
    return node.plan.roles if node.state is None else node.state.control.roles


def _end(world, deed, is_power_cut):
    node = _node(world, deed)
    if node.is_up:
        node.kill(is_power_cut=is_power_cut)
        world.loop.call_later(deed.for_s, node.start)


@_deed
def _stop(world, deed):
    _stopped(world, _node(world, deed).process, deed.for_s)


@_deed
def _stop_conductor(world, deed):
    """What nodes said and dialled meanwhile, and gave up, lies there when it goes on."""
    conductor = next(each for each in world.conductors if each.name == deed.where[0])
    if not conductor.process.is_dead:
        _stopped(world, conductor.process, deed.for_s)


def _stopped(world, process, for_s):
    process.stop()
    world.loop.call_later(for_s, process.go_on)


@_deed
def _drift(world, deed):
    """The conductor in control orders a node to prefer another role; the last of a role keeps it."""
    world.num_losses -= 1
    for conductor in world.conductors:
        if conductor.process.is_dead:
            continue
        view, membership = conductor.view, conductor.membership
        session = next((each for each in membership.sessions if each.info.node_id == deed.where[0]), None)
        if session is None or not membership.in_control():
            continue
        node = view.node(session.info.node_id)
        for role, mask in ((Role.PREFILL, view.prefill_mask), (Role.DECODE, view.decode_mask)):
            if mask >> node.slot & 1 and mask & (mask - 1):
                order = Serve(frozenset({OTHER[role]}), session.fence)
                conductor.process.context.run(session.send, order)
                return


@_deed
def _leave(world, deed):
    """SIGTERM: take no more work, end what is at work, begin again."""
    node = _node(world, deed)
    if node.is_up and node.state is not None:
        node.process.context.run(asyncio.ensure_future, _drained(world, node, deed.for_s))


async def _drained(world, node, for_s):
    node.state.is_leaving = True
    node.state.changed()
    try:
        async with asyncio.timeout(for_s):
            for work in node.works:
                await work.idle()
    except TimeoutError:
        pass
    world.loop.call_soon(_restart, world, node, node.process, context=world.context)


def _restart(world, node, process):
    if node.process is process and not process.is_dead:
        node.kill(is_power_cut=False)
        world.loop.call_later(0.1, node.start)


@_deed
def _stall(world, deed):
    _stalled(world, *deed.where, deed.for_s)


@_deed
def _stall_peers(world, deed):
    _stalled(world, *deed.where, deed.for_s)


def _stalled(world, one, other, for_s):
    world.network.stall(one, other)
    world.loop.call_later(for_s, world.network.heal, one, other)


@_deed
def _cut(world, deed):
    world.network.cut(*deed.where)


@_deed
def _cut_one_side(world, deed):
    world.network.cut(deed.where[0], deed.where[1], told=world.rng.choice(deed.where))


@_deed
def _kill_conductor(world, deed):
    conductor = next(each for each in world.conductors if each.name == deed.where[0])
    if not conductor.process.is_dead:
        conductor.kill()
        world.loop.call_later(deed.for_s, conductor.start)


_DEEDS = {
    "kill": _kill,
    "cut power": _cut_power,
    "stop": _stop,
    "leave": _leave,
    "stall": _stall,
    "stall peers": _stall_peers,
    "cut": _cut,
    "cut one side": _cut_one_side,
    "kill conductor": _kill_conductor,
    "stop conductor": _stop_conductor,
    "drift": _drift,
}
