"""A cluster with an hour behind it, as the page at /ui is given it: a conductor's classes, and no process."""

import math
import random
from dataclasses import replace

from base.config import ClusterConfig, SloConfig
from base.messages import Prefilled, PrefillTimes
from base.request import NodeId, RequestId, Role, SampledToken, Slo
from conductor.placing.decisions import Actual, decision
from conductor.placing.explain import Decisions
from conductor.placing.placement import Placement
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.replay.arguments import service_arguments
from conductor.serving.page_data import PageData, PageSettings
from conductor.serving.replays import Replays
from conductor.serving.traffic import Traffic
from tests.conductor.builders import BLOCK_SIZE, make_heartbeat, make_request
from tests.conductor.histories import COST, Line, attach, make_history

BOUNDS = SloConfig(ttft_s=4.0, tbt_s=0.1)
SLO = Slo(4.0, 0.1)
SETTINGS = SchedulerSettings(roles_follow=True)
TRACE_PAGE = "http://127.0.0.1:16686/trace/{trace_id}"
HOSTILE = "<img src=x onerror=\"document.title='hacked'\">"


class ShownCluster:
    """A conductor's account of some nodes and of an hour of requests."""

    is_ready = True

    def __init__(self, num_prefill=2, num_decode=2, seconds=3_600, seed=1, hosts=2):
        self.rng = random.Random(seed)
        self.clock, self.view, self.metrics, self.membership, self.history = make_history(BOUNDS)
        self.decisions = Decisions(COST, SETTINGS)
        self.traffic = Traffic(self.clock)
        self.queue, self.num_running, self.number = Line(), 0, 0
        self.sessions = []
        for role, count in ((Role.PREFILL, num_prefill), (Role.DECODE, num_decode)):
            for number in range(count):
                self.join(f"{role.value}-{number}", role, f"gpu-host-{number % hosts}")
        if num_prefill + num_decode:
            for second in range(seconds):
                self.second(second)
        arguments = service_arguments(ClusterConfig(profile="a800-llama70b", slo=BOUNDS))
        self.replays = Replays(self.traffic, BLOCK_SIZE, arguments, dict)
        settings = PageSettings(BOUNDS, TRACE_PAGE, roles_follow=True)
        self.data = PageData(
            self.history, self, self.membership, self.view, self.decisions, settings, self.clock
        )

    @property
    def reports(self):
        return {
            "/v1/page/{name}": self.data.answer,
            "/v1/replay": lambda body: self.replays.run(
                body.trace, body.nodes, body.arguments(), body.slo(BOUNDS)
            ),
        }

    def join(self, name, role, host):
        self.sessions.append(attach(self.membership, name, role, host=host))

    def second(self, second):
        busy = 0.6 + 0.5 * math.sin(second / 600)
        self.clock.advance(1.0)
        for number, session in enumerate(self.sessions):
            if (second + number) % 10 == 0:
                held = int(2_700 * min(0.97, busy * (0.5 + 0.2 * (number % 3))))
                beat = make_heartbeat(
                    num_free_blocks=2_700 - held,
                    num_held_blocks=held,
                    num_running=int(12 * busy) + number % 5,
                    num_queued_tokens=int(9_000 * busy) if number % 2 == 0 else 0,
                    num_context_tokens=60_000,
                    num_step_rows=int(12 * busy) if number >= len(self.sessions) / 2 else 0,
                    num_step_prompt_tokens=1_536 if number < len(self.sessions) / 2 else 0,
                    step_budget_tokens=2_048,
                )
                self.membership.heartbeat(session, beat, self.clock.now_s())
        for _ in range(self.rng.random() < busy):
            self.ask(busy)
        self.num_running = int(20 * busy)
        self.history.take(num_waiting=int(4 * busy))

    def ask(self, busy):
        now_s, self.number = self.clock.now_s(), self.number + 1
        name = HOSTILE if self.number == 40 else f"chat{self.number:05x}-{self.rng.getrandbits(32):08x}"
        first = self.rng.choice([0, 0, 1_000, 5_000 + 100 * self.number])
        request = make_request(f"{name}.1", self.rng.randrange(2, 24), first, slo=SLO)
        request = replace(request, chain=[key.to_bytes(16, "little") for key in request.chain])
        result = place(request, self.view, COST, now_s, SETTINGS)
        made = decision(request, self.view, result, now_s - 0.1 * self.rng.random(), now_s)
        for observer in (self.decisions, self.traffic, self.history):
            observer.decided(made)
        if not isinstance(result, Placement):
            self.rejected(name)
            return
        self.view.index.store(self.view.node(result.prefill_node).slot, request.chain)
        slower = self.rng.choice([0.9, 1.0, 1.1, 1.2, 1.3, 3.0])
        times = PrefillTimes(
            result.queue_s * slower,
            result.prefill_s * slower,
            result.handoff_s,
            0.0,
            0.0,
            0.8 * result.prefill_s,
            3,
        )
        waited_s = made.decided_at_s - made.arrived_at_s
        ttft_s = waited_s + times.queue_s + times.compute_s + times.exposed_transfer_s + 0.02
        tbt_s = 0.03 + 0.06 * busy * self.rng.random()
        answer = Prefilled(name, SampledToken(1), None, 0, (), times)
        self.history.first_token(ttft_s, answer, request, result)
        num_new = self.rng.randrange(20, 300)
        actual = Actual(now_s + ttft_s + tbt_s * num_new, "finished", ttft_s, *times[:3], tbt_s, 0, num_new)
        more = {"frontend_s": 0.004, "reserved_s": 0.006, "load_s": 0.0, "transfer_s": times.transfer_s}
        more |= {"num_cached_tokens": result.matched_tokens, "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}
        actual = actual._replace(**more, num_chunks=3)
        for observer in (self.decisions, self.history, self.traffic):
            observer.ended(request.request_id, actual)
        self.traffic.finished(RequestId(name), num_new, "stop", "")
        self.count(ttft_s, tbt_s, request.num_tokens, result.matched_tokens, num_new)

    def rejected(self, name):
        self.traffic.finished(RequestId(name), 0, "SloUnreachableError", "")
        self.metrics.sequences.labels("SloUnreachableError").inc()
        self.metrics.rejections.labels("slo").inc()

    def count(self, ttft_s, tbt_s, num_tokens, num_cached, num_new):
        self.metrics.sequences.labels("stop").inc()
        if ttft_s <= SLO.ttft_slo_s and tbt_s <= SLO.tbt_slo_s:
            self.metrics.good_sequences.inc()
        self.metrics.prompt_tokens.inc(num_tokens)
        self.metrics.cached_tokens.inc(num_cached)
        self.metrics.generation_tokens.inc(num_new)

    def keeps_moving(self):
        """Let KV flow at this moment, from each prefill node to some decode nodes."""
        prefill = [each for each in self.view.node_ids() if each.startswith("prefill")]
        decode = [each for each in self.view.node_ids() if each.startswith("decode")]
        for number, node in enumerate(prefill):
            for at in range(2):
                target = decode[(number + at) % len(decode)]
                self.history.links.add((NodeId(node), target), 4e9 / (1 + number + at), self.clock.now_s())
        return self
