"""The stages of one engine as threads of one process, which hand tensors on through queues.

What `engine/ranks.py` does with processes and gloo; everything else is the real thing.
"""

from __future__ import annotations

import copy
import queue
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from base.clock import SystemClock
from engine.arrivals import ArrivingBlocks
from engine.block_pool import BlockPool
from engine.cpu_runner import Runner
from engine.gpu_model import GpuModel
from engine.gpu_runner import GpuPipelineRunner
from engine.loop import EngineLoop
from engine.model import PagedModel
from engine.paged_cache import PagedCache
from engine.pipeline import Stage
from engine.rank_group import GroupShape
from engine.scaled_kv import scaled_layout
from engine.scheduler import Scheduler
from engine.self_check import eager_logits, require_faithful
from tests.engine.test_families import SMALL

END = object()
PATIENCE_S = 60


def has_run():
    """In the interpreter, what was launched has run."""
    return lambda: None


class QueueLink:
    """Both ends of a link."""

    def __init__(self):
        self.device = torch.device("cpu")
        self._queue = queue.SimpleQueue()

    def send(self, tensor):
        self._queue.put(tensor.clone())

    def receive(self, tensor):
        tensor.copy_(self._queue.get(timeout=PATIENCE_S))
        return tensor


class ThreadRanks:
    """Stands in for `Ranks`: tells threads of steps, and knows which they have run."""

    def __init__(self, split):
        num_stages = len(split)
        self.shape = GroupShape(stages=num_stages)
        layers = [split[self.shape.place(rank)[0]] for rank in range(num_stages)]
        self.num_sent_steps = 0
        self.steps = [queue.SimpleQueue() for _ in range(num_stages)]
        self.arriving = [ArrivingBlocks((1,) * num_layers, SystemClock()) for num_layers in layers]
        self._num_ran = [0] * num_stages
        self._changed = threading.Condition()

    def send_step(self, numbers, loads=()):
        self.num_sent_steps += 1
        for rank in range(1, self.shape.size):
            self.steps[rank].put((numbers, self.arriving[rank].of(loads)))
        return nullcontext()

    def ran(self, rank):
        with self._changed:
            self._num_ran[rank] += 1
            self._changed.notify_all()

    def wait_ran(self, ranks, step):
        with self._changed:
            assert self._changed.wait_for(
                lambda: all(self._num_ran[rank] >= step for rank in ranks if rank), PATIENCE_S
            )


class Stages:
    """An engine of several stages. `runner` is the first rank's."""

    def __init__(
        self,
        model: PreTrainedModel,
        split: tuple[int, ...],
        chunk_tokens: int = 48,
        num_blocks: int = 64,
        make_runner=lambda runner, ranks: runner,
        on_gpu: bool = False,
        kv_dtype: str = "auto",
    ):
        """Build it, with the GPU's way through the model (in Triton's interpreter) if `on_gpu`."""
        self.ranks = ThreadRanks(split)
        links = [QueueLink() for _ in split[1:]]
        made = [PagedModel(copy.deepcopy(model)) for _ in split]
        expected = eager_logits(made[0])
        self.models = made
        self.caches, runners = [], []
        for index, (paged, count) in enumerate(zip(made, split, strict=True)):
            before = links[index - 1] if index else None
            after = links[index] if index < len(links) else None
            first = sum(split[:index])
            stage = Stage(index, before, after)
            paged.keep_stage(stage, range(first, first + count))
            shape = paged.shape
            layout = replace(shape, block_size=16)
            # One after the other: what a stage sends waits in its queue.
            require_faithful(paged, layout, expected)
            if kv_dtype == "fp8":
                layout = scaled_layout(layout)
            cache = PagedCache(layout, num_blocks, paged.device)
            self.caches.append(cache)
            ranks = self.ranks if index == len(split) - 1 else None
            if on_gpu:
                gpu_model = GpuModel(paged.module, cache, is_compiled=False, stage=stage)
                runners.append(
                    GpuPipelineRunner(gpu_model, stage, 16, (chunk_tokens, 6, 32), split, ranks, has_run)
                )
            else:
                runners.append(Runner(paged, cache, SystemClock(), ranks, None, stage, split))
        self.runner = runners[-1]
        self.pool = BlockPool(num_blocks)
        scheduler = Scheduler(self.pool, 16, chunk_tokens, 6, made[-1].max_model_len)
        self.loop = EngineLoop(make_runner(self.runner, self.ranks), scheduler, self.pool, SystemClock())
        self._threads = [
            threading.Thread(target=self._follow, args=(stage + 1, runner))
            for stage, runner in enumerate(runners[:-1])
        ]

    def _follow(self, rank, runner):
        while (told := self.ranks.steps[rank].get()) is not END:
            runner.follow(*told)()
            self.ranks.ran(rank)

    @contextmanager
    def running(self):
        for thread in self._threads:
            thread.start()
        try:
            yield self.loop
        finally:
            for rank in range(1, self.ranks.shape.size):
                self.ranks.steps[rank].put(END)
            for thread in self._threads:
                thread.join(PATIENCE_S)


def deep_llama(num_layers: int = 5) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", **SMALL | {"num_hidden_layers": num_layers, "num_key_value_heads": 4}
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
