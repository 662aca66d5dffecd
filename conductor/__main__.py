"""The conductor process.

    python -m conductor --config conductor.json

Prints one JSON line on standard output when it is ready, then logs to standard error. It
drains on SIGTERM, and when nobody holds its lifeline any more (`base/lifetime.py`).
"""

from __future__ import annotations

import asyncio
import random
import secrets
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import uvloop

from base.clock import SystemClock, wall_clock_s
from base.config import ClusterConfig, ConductorProcess, SloConfig
from base.lifetime import Lifetime
from base.messages import Registered
from base.metrics import ConductorMetrics, export_supervised, process_registry
from base.process import run_process
from base.spans import tracer_or_none
from conductor.api.completion import Completions
from conductor.api.replay_body import ReplayBody
from conductor.api.served_model import ServedModel, load_served_model
from conductor.api.server import listening
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.decision_lines import Shared
from conductor.placing.explain import Decisions
from conductor.placing.prefill_policies import scheduler_settings
from conductor.placing.profile import Profile
from conductor.placing.roles import RoleController
from conductor.profiles.reader import load_profile
from conductor.replay.arguments import service_arguments
from conductor.serving.attach import AttachService
from conductor.serving.budgets import Budgets
from conductor.serving.decision_log import DecisionLog
from conductor.serving.dispatch import Dispatcher, RequestObserver
from conductor.serving.history import History
from conductor.serving.link_check import LinkCheck
from conductor.serving.membership import Membership
from conductor.serving.observer import Observer
from conductor.serving.page_data import PageData, PageSettings
from conductor.serving.prometheus_history import PrometheusHistory
from conductor.serving.replays import Replays, paces_of
from conductor.serving.request_spans import RequestSpans
from conductor.serving.role_changes import follow_load
from conductor.serving.status import export_gauges, status
from conductor.serving.traffic import Traffic


async def serve(config: ConductorProcess, model: ServedModel, lifetime: Lifetime) -> None:
    """Run the conductor until it is asked to stop. The wiring diagram of the process."""
    clock = SystemClock()
    rng = random.Random(secrets.randbits(64))
    cost = CostModel(_profile(config))
    view = ClusterView(cost, config.block_size)
    membership = Membership(config.model_id, view, clock)
    registry = process_registry()
    metrics = ConductorMetrics(registry, config.served_model_name)
    settings = scheduler_settings(config.scheduler)
    decisions = Decisions(
        cost, settings, _decision_log(config, Shared(cost.profile, settings, config.model_id))
    )
    budgets = Budgets(config.slo, cost, settings)
    history = History(metrics, membership, view, cost, clock, wall_clock_s, budgets)
    observers: list[RequestObserver] = [Observer(metrics, view, cost, decisions, clock), history]
    traffic = Traffic(clock)
    observers.append(traffic)
    tracer = tracer_or_none(config.tracing, "conductor")
    if tracer is not None:
        observers.append(RequestSpans(tracer))
    server = config.server
    dispatcher = Dispatcher(membership, view, cost, observers, clock, settings, server, config.scheduler)
    bounds = (server.max_waiting, int(server.max_body_mib * (1 << 20)), bool(server.keys_file))
    completions = Completions(model, dispatcher, metrics, clock, *bounds, server.request_timeout_s)
    step_cost = cost.step if config.scheduler.step_budgets else None
    lease = Registered(server.lease_s, server.heartbeat_s, rng.getrandbits(63), step_cost)
    nodes = AttachService(membership, lease, clock, server.tls.is_set)
    prometheus = PrometheusHistory(server.prometheus, clock, wall_clock_s) if server.prometheus else None
    shown = PageSettings(config.slo, config.tracing.page, bounds[1], settings.roles_follow)
    page = PageData(history, dispatcher, membership, view, decisions, shown, clock, prometheus)
    arguments = _replay_arguments(config)
    replays = Replays(traffic, config.block_size, arguments, partial(paces_of, view))
    reports: dict[str, Callable[..., object]] = {
        "/status": partial(status, dispatcher, membership, view, lifetime),
        "/v1/explain": lambda: decisions.recent(clock.now_s()),
        "/v1/explain/{name}": decisions.explain,
        "/v1/links/{name}": LinkCheck(membership, rng).measure,
        "/v1/page/{name}": page.answer,
        "/v1/replay": _replay(replays, config.slo),
    }
    async with listening(
        completions, server, config.slo, rng, nodes.stream, reports, nodes=config.nodes
    ) as ports:
        export_gauges(metrics, dispatcher, membership, clock)
        export_supervised(registry, lifetime)
        membership.on_change(ports.health.refresh)
        await lifetime.ready(
            http_port=ports.http_port, grpc_port=ports.grpc_port, attach_port=ports.attach_port
        )
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(history.keep(dispatcher))]
            if settings.roles_follow:
                following = follow_load(RoleController(cost), view, membership, dispatcher, clock)
                beside.append(tasks.create_task(following))
            await lifetime.stopped()
            for task in beside:
                task.cancel()
    if tracer is not None:
        await asyncio.to_thread(tracer.close)


def _replay(replays: Replays, slo: SloConfig) -> Callable[[ReplayBody], Awaitable[object]]:
    return lambda body: replays.run(body.trace, body.nodes, body.arguments(), body.slo(slo))


def _profile(config: ConductorProcess) -> Profile:
    profile = load_profile(config.profile)
    return profile if config.store.is_used else profile.without_store()


def _replay_arguments(config: ConductorProcess) -> list[str]:
    return service_arguments(
        ClusterConfig(profile=config.profile, scheduler=config.scheduler, slo=config.slo, store=config.store)
    )


def _decision_log(config: ConductorProcess, shared: Shared) -> DecisionLog | None:
    if not config.scheduler.decision_log:
        return None
    max_bytes = int(config.scheduler.decision_log_mib * (1 << 20))
    return DecisionLog(Path(config.scheduler.decision_log).expanduser(), shared, max_bytes)


def prepare(config: ConductorProcess) -> Callable[[Lifetime], None]:
    model = load_served_model(Path(config.model_path), config.served_model_name, config.server.model_family)
    return lambda lifetime: uvloop.run(serve(config, model, lifetime))


def main() -> int:
    return run_process("conductor", ConductorProcess, lambda _: "conductor", prepare)


if __name__ == "__main__":
    sys.exit(main())
