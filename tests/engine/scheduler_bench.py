"""A scheduler on a fake device, for the tests of what it plans."""

from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step import SequenceOutput
from engine.swap_space import SwapSpace
from tests.engine.fakes import FakeDevice

BLOCK_SIZE = 4


class Bench:
    """A scheduler on a fake device, step by step."""

    def __init__(
        self, num_blocks=64, chunk_tokens=8, max_batch=8, max_model_len=64, num_slots=0, block_s=0.0
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.swap_space = SwapSpace(num_slots, block_s)
        self.scheduler = Scheduler(
            self.pool, BLOCK_SIZE, chunk_tokens, max_batch, max_model_len, swap_space=self.swap_space
        )
        self.device = FakeDevice(num_blocks, BLOCK_SIZE)
        self.step_s = 0.0

    def step(self) -> list[SequenceOutput] | None:
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        outputs = self.scheduler.commit(plan, self.device.execute(plan), self.step_s)
        self.check()
        return outputs

    def run(self) -> None:
        """Step until nothing runs; release what finishes."""
        while (outputs := self.step()) is not None:
            for output in outputs:
                if output.finish_reason is not None:
                    self.scheduler.release(output.sequence)

    def check(self) -> None:
        self.scheduler.check()
        self.pool.check()

    def shape_of_last_step(self) -> list[tuple[str, int]]:
        return [(entry.sequence.request_id, entry.num_tokens) for entry in self.device.plans[-1].entries]


def generated(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]
