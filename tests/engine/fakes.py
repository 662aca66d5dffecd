"""A device without a model: it keeps in each slot what a model's KV would depend on."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

from base.request import SampledToken
from engine.block_pool import BlockPool
from engine.runner import StepRunner
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step import LaunchedStep, StepEntry, StepPlan, StepResult
from engine.swap_space import SwapSpace
from tests.engine.builders import make_sequence


def prefix_digest(token_ids: Items[int]) -> int:
    digest = 0
    for token_id in token_ids:
        digest = (digest * 1_000_003 + token_id + 1) % (1 << 61)
    return digest


def next_token(token_ids: Items[int], vocab_size: int = 50) -> int:
    """What the fake model continues a text with."""
    return prefix_digest(token_ids) % vocab_size


def continuation(token_ids: Items[int], count: int) -> list[int]:
    tokens = list(token_ids)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(token_ids) :]


class FakeDevice(StepRunner):
    """Writes the digest of each token's prefix to its slot, and refuses to read a wrong one."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._slots = [[0] * block_size for _ in range(num_blocks)]
        self._host: dict[int, list[int]] = {}
        self._block_size = block_size
        self.plans: list[StepPlan] = []

    def move(self, plan: StepPlan) -> None:
        for swap in plan.swaps:
            for block, slot in zip(swap.blocks, swap.slots, strict=False):
                if swap.is_out:
                    self._host[slot] = self._slots[block].copy()
                else:
                    self._slots[block] = self._host[slot].copy()

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.move(plan)
        tokens = []
        for entry in plan.entries:
            token_ids = entry.sequence.token_ids[: entry.context_len]
            self.write(entry, token_ids)
            tokens.append(SampledToken(next_token(token_ids)) if entry.samples else None)
        return StepResult(tuple(tokens))

    def write(self, entry: StepEntry, token_ids: list[int]) -> None:
        digest = 0
        for position, token_id in enumerate(token_ids):
            digest = (digest * 1_000_003 + token_id + 1) % (1 << 61)
            index, offset = divmod(position, self._block_size)
            block = self._slots[entry.block_table[index]]
            if position >= entry.start:
                block[offset] = digest
            assert block[offset] == digest, f"{entry.sequence.request_id} reads a foreign token at {position}"


class LaunchingFakeDevice(StepRunner):
    """The same for steps that are launched before the tokens of earlier ones are known."""

    max_steps = 2

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._device = FakeDevice(num_blocks, block_size)
        self._sampled: dict[Sequence, int] = {}

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self._device.move(plan)
        tokens = []
        for entry in plan.entries:
            token_ids = entry.sequence.token_ids[: entry.context_len]
            if len(token_ids) < entry.context_len:
                token_ids.append(self._sampled[entry.sequence])
            assert len(token_ids) == entry.context_len
            self._device.write(entry, token_ids)
            sampled = SampledToken(next_token(token_ids)) if entry.samples else None
            if sampled is not None:
                self._sampled[entry.sequence] = sampled.token_id
            tokens.append(sampled)
        result = StepResult(tuple(tokens))
        return LaunchedStep(lambda: result)


def run_at_random(
    device_type: type[FakeDevice], block_size: int, rng: random.Random, drawn: Callable[[], dict[str, Any]]
) -> list[Sequence]:
    """Run a dozen sequences to their ends in few blocks: cached, cut into chunks and preempted, by chance.

    `drawn` returns the fields of each.
    """
    pool = BlockPool(rng.randint(14, 24))
    scheduler = Scheduler(pool, block_size, rng.choice([6, 8, 16]), 4, 64, swap_space=SwapSpace(8, 0.001))
    device = device_type(pool.num_blocks, block_size)
    sequences = [
        make_sequence(
            f"s{number}",
            [rng.randrange(2) for _ in range(rng.randint(1, 30))],
            max_tokens=rng.randint(1, 12),
            arrived_at_s=float(number),
            priority=rng.randrange(2),
            **drawn(),
        )
        for number in range(12)
    ]
    waiting = list(sequences)
    for _ in range(600):
        if waiting and rng.random() < 0.3:
            scheduler.add(waiting.pop())
        plan = scheduler.schedule()
        if plan is None:
            if not waiting:
                break
            continue
        for output in scheduler.commit(plan, device.execute(plan)):
            if output.finish_reason is not None:
                scheduler.release(output.sequence)
        scheduler.check()
        pool.check()
    return sequences
