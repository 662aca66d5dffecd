"""A GPU's draws behind its graph, without a GPU: masks come a step late, and each step has its own."""

import pytest
import torch

from base.errors import LostError
from base.grammar import Vocabulary
from base.request import SamplingParams, StopParams
from engine.drawing import Drawer
from engine.step import StepEntry, StepPlan
from engine.step_memory import StepShape, StepWriter
from tests.conductor.fakes import write_model_folder
from tests.engine.builders import make_sequence
from tests.engine.grammars import END, GRAMMARS, VOCAB_SIZE, constrained_sequence

PROMPT = [70, 71, 72]
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Vocabulary:
    return Vocabulary.load(write_model_folder(tmp_path_factory.mktemp("model")), VOCAB_SIZE)


class Device:
    """Launches steps whose logits are made up, and draws as `GpuRunner` does; nothing is asynchronous."""

    def __init__(self):
        self.largest = StepShape(8, 8, 0, 4)
        self.memory = torch.zeros(self.largest.size, dtype=torch.int32)
        self.last_tokens = torch.zeros(8, dtype=torch.int64)
        self.drawer = Drawer(self.memory, self.last_tokens, mark=lambda: lambda: None)
        self.rows_of = {}
        self.num_launched = 0

    def launch(self, sequences, ahead=0):
        """Launch a step of these sequences, `ahead` tokens after those that they know."""
        entries = [
            StepEntry(item, item.num_tokens - 1 + ahead, 1, tuple(range(4)), samples=True)
            for item in sequences
        ]
        plan, shape = StepPlan(tuple(entries), len(entries)), StepShape(len(entries), len(entries), 0, 4)
        host = StepWriter(self.largest.size, BLOCK_SIZE, pinned=False).write(plan, shape, self.rows_of)
        self.memory[: shape.size].copy_(host)
        generator = torch.Generator().manual_seed(self.num_launched)
        logits = torch.randn(len(entries), VOCAB_SIZE, generator=generator)
        self.num_launched += 1
        # What the graph draws: its greedy tokens.
        self.last_tokens[: len(entries)] = logits.argmax(-1)
        rows = tuple(range(len(entries)))
        self.rows_of = dict(zip(sequences, rows, strict=True))
        return self.drawer.draw(plan, shape, logits, rows)


def take(resolve, sequences):
    tokens = resolve().tokens
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.token_ids.append(token.token_id)
    return tokens


def sequences_of(vocabulary, **fields):
    formed = [
        constrained_sequence(vocabulary, f"c{at}", PROMPT, GRAMMARS[at], 60, **fields) for at in range(3)
    ]
    return [formed[0], make_sequence("free", PROMPT, 60), *formed[1:]]


def one_by_one(vocabulary, count, **fields):
    device, sequences = Device(), sequences_of(vocabulary, **fields)
    for _ in range(count):
        take(device.launch(sequences), sequences)
    return sequences


def ahead(vocabulary, count, **fields):
    device, sequences = Device(), sequences_of(vocabulary, **fields)
    resolve = device.launch(sequences)
    for _ in range(count - 1):
        following = device.launch(sequences, ahead=1)
        take(resolve, sequences)
        resolve = following
    take(resolve, sequences)
    return sequences


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, logit_bias=((80, 90.0),))]
)
def test_steps_launched_ahead_draw_the_same_tokens(vocabulary, sampling):
    slow, fast = (run(vocabulary, 20, sampling=sampling) for run in (one_by_one, ahead))
    assert [item.token_ids for item in slow] == [item.token_ids for item in fast]
    for item in slow:
        if item.constraint is not None:
            item.constraint.follow(item.token_ids[len(PROMPT) + item.constraint.num_tokens :])
            assert not item.constraint.error


def test_a_sequence_without_a_grammar_draws_as_if_alone(vocabulary):
    sequences = ahead(vocabulary, 6)
    expected = [
        int(torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(step))[1].argmax())
        for step in range(6)
    ]
    assert sequences[1].token_ids[len(PROMPT) :] == expected


def test_log_probabilities_are_those_before_the_mask(vocabulary):
    device = Device()
    stop = StopParams(9, 0, (END,))
    sequence = constrained_sequence(vocabulary, "a", PROMPT, GRAMMARS[1], 9, num_logprobs=2)
    assert sequence.stop == stop
    (token,) = take(device.launch([sequence]), [sequence])
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    assert token.logprobs.logprob == pytest.approx(float(logits[0, token.token_id]), abs=1e-5)
    assert token.logprobs.top[0][1] == pytest.approx(float(logits.max()), abs=1e-5)
    assert token.token_id != token.logprobs.top[0][0]


def test_a_step_whose_predecessor_failed_fails_and_the_next_one_runs(vocabulary):
    device, sequences = Device(), sequences_of(vocabulary)
    device.launch(sequences)  # nobody resolves it: its own wait raised
    orphan = device.launch(sequences, ahead=1)
    with pytest.raises(LostError, match="the step before failed"):
        orphan()
    fresh = sequences_of(vocabulary)
    assert len(take(device.launch(fresh), fresh)) == 4
