"""Token masks: which tokens the grammars of a step's sequences let come next.

    event loop      compile, once for each grammar -> `Sequence.constraint`
    device thread   begin(plan) ----- the step runs ----- wait, mask the logits, sample
    mask thread               \\-- follow, fill --/

A mask is a function of the tokens before it, so it is computed while the step that will need it runs, on
threads of its own; the interpreter's lock is not held meanwhile. Nothing about a mask is kept between steps
but how far its sequence was followed.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import cached_property

import torch

from base.errors import ConfigError, InvalidRequestError
from base.grammar import Constraint, MaskFiller, Vocabulary
from base.request import Grammar, StopParams
from engine.sequence import Sequence

MAX_THREADS = 8
STACK_BYTES = 64 << 20
"""Address space for the stack of a thread that compiles: many times what the deepest grammar takes."""


class Grammars:
    """Compiles the grammars of sequences. Belongs to the event loop.

    The vocabulary is loaded for the first grammar, or before: that takes a second or some."""

    def __init__(self, load: Callable[[], Vocabulary], thread: Callable[[], Executor] | None = None) -> None:
        """Begin; `load` raises ConfigError where there is no vocabulary, and `thread` makes who compiles."""
        self._load = load
        self._make_thread = thread or _compiling_thread

    def expect(self, grammar: Grammar | None) -> None:
        """Begin to compile what a sequence that is about to come needs."""
        if grammar is not None:
            compiled = self._thread.submit(lambda: self._vocabulary.compile(grammar))
            compiled.add_done_callback(Future.exception)

    def warm(self) -> None:
        """Begin to load the vocabulary, so that the first grammar need not wait for it."""
        self._thread.submit(lambda: self._vocabulary).add_done_callback(Future.exception)

    async def constrain(self, sequence: Sequence) -> None:
        """Give a sequence its constraint, if it has a grammar; raises InvalidRequestError."""
        grammar = sequence.sampling.grammar
        if grammar is not None:
            loop = asyncio.get_running_loop()
            sequence.constraint = await loop.run_in_executor(
                self._thread, self._begin, grammar, sequence.stop
            )

    @cached_property
    def _thread(self) -> Executor:
        return self._make_thread()

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._load()

    def _begin(self, grammar: Grammar, stop: StopParams) -> Constraint:
        try:
            return self._vocabulary.constraint(grammar, stop)
        except ConfigError as error:
            raise InvalidRequestError(f"grammar: {error}", "grammar") from None


def no_vocabulary() -> Vocabulary:
    """Stand in for the loading of a vocabulary where there is none."""
    raise ConfigError("this engine was built without a tokenizer")


def _compiling_thread() -> Executor:
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = ThreadPoolExecutor(1, "grammars")
        thread.submit(int).result()
        return thread
    finally:
        threading.stack_size(before)


class TokenMasks:
    """Computes the masks of steps. Belongs to the device thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "masks")

    @cached_property
    def _filler(self) -> MaskFiller:
        return MaskFiller(max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2)))

    def begin(
        self, sequences: Rows[Sequence], newest: Mapping[Sequence, int] | None = None, pinned: bool = False
    ) -> Callable[[], torch.Tensor]:
        """Begin to compute the masks of sequences that all have a constraint; return what waits for them.

        Args:
            newest: A token of each sequence that was sampled after those it has.
            pinned: Whether the masks are to lie where a GPU copies from.

        Returns masks as int32 [num_seqs, words] on the host: bit `i`, counted from the lowest of the first
        word, is whether token `i` may come."""
        added = newest or {}
        work = []
        for sequence in sequences:
            assert sequence.constraint is not None, "only those that have one"
            begin = sequence.num_prompt_tokens + sequence.constraint.num_tokens
            token_ids = sequence.token_ids[begin:]
            work.append(
                (sequence.constraint, [*token_ids, *([added[sequence]] if sequence in added else ())])
            )
        num_words = work[0][0].vocabulary.num_words
        masks = torch.empty((len(work), num_words), dtype=torch.int32, pin_memory=pinned)
        return self._thread.submit(self._computed, work, masks).result

    def _computed(self, work: Rows[tuple[Constraint, list[int]]], masks: torch.Tensor) -> torch.Tensor:
        for constraint, token_ids in work:
            constraint.follow(token_ids)
        self._filler.fill([constraint for constraint, _ in work], masks.numpy())
        return masks


def constrained(sequences: Rows[Sequence]) -> list[Sequence]:
    """Return those that have a constraint."""
    return [sequence for sequence in sequences if sequence.constraint is not None]
