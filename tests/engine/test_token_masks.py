"""Sequences under grammars, in the engine: the tokens of the slow way, whoever else is in the batch."""

import json

import pytest
from jsonschema import validate

from base.errors import InvalidRequestError
from base.grammar import Vocabulary
from base.request import FinishReason, Grammar, GrammarKind, SamplingParams, StopParams
from engine.loop import EngineLoop
from engine.token_masks import Grammars, no_vocabulary
from engine.token_stream import failure_of
from tests.conductor.fakes import write_model_folder
from tests.engine.builders import greedy, make_loop, make_model, make_sequence, run_sequences
from tests.engine.grammars import (
    END,
    GRAMMARS,
    PERSON,
    TOKENIZER,
    VOCAB_SIZE,
    constrained_reference,
    constrained_sequence,
    make_spelling_model,
)

PROMPTS = [[70 + index, 80, 90, 100 + index] for index in range(6)]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Vocabulary:
    return Vocabulary.load(write_model_folder(tmp_path_factory.mktemp("model")), VOCAB_SIZE)


@pytest.fixture(scope="module")
def reference_model():
    return make_spelling_model()


@pytest.fixture
def loop() -> EngineLoop:
    return make_loop(make_model(make_spelling_model()))


def asked(vocabulary, **fields):
    """Six sequences, two under each grammar."""
    return [
        constrained_sequence(vocabulary, f"r{at}", prompt, GRAMMARS[at % 3], **fields)
        for at, prompt in enumerate(PROMPTS)
    ]


def token_ids(results):
    return [[token.token_id for token in results[f"r{at}"]] for at in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def expected(vocabulary, reference_model):
    return [
        constrained_reference(reference_model, vocabulary, prompt, GRAMMARS[at % 3])
        for at, prompt in enumerate(PROMPTS)
    ]


async def test_greedy_tokens_are_those_of_the_slow_way(loop, vocabulary, expected):
    assert token_ids(await run_sequences(loop, asked(vocabulary))) == expected
    texts = [TOKENIZER.decode(tokens) for tokens in expected if tokens[-1] == END]
    assert texts, "at least one is complete"


async def test_whoever_has_no_grammar_is_not_touched(loop, vocabulary, expected):
    free = [make_sequence(f"free{at}", prompt, 12) for at, prompt in enumerate(PROMPTS)]
    alone = await greedy(make_loop(make_model(make_spelling_model())), PROMPTS, 12)
    results = await run_sequences(loop, [*free, *asked(vocabulary)])
    assert [[token.token_id for token in results[item.request_id]] for item in free] == alone
    assert token_ids(results) == expected


async def test_preempted_sequences_go_on_in_their_grammar(vocabulary, expected):
    loop = make_loop(make_model(make_spelling_model()), num_blocks=8)
    assert token_ids(await run_sequences(loop, asked(vocabulary))) == expected
    assert loop.scheduler.num_preemptions


async def test_a_sequence_goes_on_elsewhere_from_its_tokens(loop, vocabulary, expected):
    """What a decode node's death leaves: the prompt, and the tokens so far."""
    moved = asked(vocabulary)
    for sequence, tokens in zip(moved, expected, strict=True):
        sequence.token_ids += tokens[: len(tokens) // 2]
    rest = token_ids(await run_sequences(loop, moved))
    assert [
        tokens[: len(tokens) // 2] + more for tokens, more in zip(expected, rest, strict=True)
    ] == expected


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_drawn_is_of_the_grammar_too(loop, vocabulary, seed):
    sampling = SamplingParams(temperature=1.8, top_p=0.9, seed=seed, logit_bias=((70, 50.0),))
    tokens = token_ids(await run_sequences(loop, asked(vocabulary, sampling=sampling, max_tokens=120)))
    ended = [TOKENIZER.decode(each) for each in tokens[::3] if each[-1] == END]
    for text in ended:
        validate(json.loads(text), PERSON)
    assert all(TOKENIZER.decode(each[:-1])[-3:].isdigit() for each in tokens[1::3] if each[-1] == END)


async def test_penalties_logprobs_and_the_least_number_of_tokens_go_with_a_grammar(loop, vocabulary):
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    sequences = asked(vocabulary, sampling=sampling, num_logprobs=3, min_tokens=15)
    results = await run_sequences(loop, sequences)
    for tokens in results.values():
        assert all(token.logprobs is not None and len(token.logprobs.top) == 3 for token in tokens)
        # Log probabilities are the model's, before the grammar.
        assert all(token.logprobs.logprob <= token.logprobs.top[0][1] for token in tokens)
    text = TOKENIZER.decode([token.token_id for token in results["r1"]])
    assert text[-5:].isdigit(), "it might have ended after three of them"
    assert len(results["r2"]) > 15


async def test_what_is_complete_ends_before_the_least_number_of_tokens(loop, vocabulary):
    only = Grammar(GrammarKind.REGEX, "hello")
    sequence = constrained_sequence(vocabulary, "a", PROMPTS[0], only, min_tokens=30)
    results = await run_sequences(loop, [sequence])
    assert TOKENIZER.decode([token.token_id for token in results["a"]]) == "hello"
    assert sequence.finish_reason is FinishReason.STOP


async def test_a_grammar_that_cannot_be_followed_ends_its_sequence_alone(loop, vocabulary, expected):
    broken = constrained_sequence(vocabulary, "broken", PROMPTS[0], GRAMMARS[1])
    broken.token_ids += TOKENIZER.encode("no").ids
    results = await run_sequences(loop, [broken, *asked(vocabulary)])
    assert token_ids(results) == expected
    assert broken.finish_reason is FinishReason.ERROR
    error = failure_of(broken)
    assert isinstance(error, InvalidRequestError)
    assert "after 1 tokens" in str(error)


async def test_grammars_are_compiled_for_sequences_that_have_one(vocabulary):
    grammars = Grammars(lambda: vocabulary)
    plain = make_sequence("plain", PROMPTS[0])
    await grammars.constrain(plain)
    assert plain.constraint is None
    grammars.expect(GRAMMARS[0])
    grammars.expect(Grammar(GrammarKind.REGEX, "(a"))
    sampling = SamplingParams(grammar=GRAMMARS[0])
    wanted = make_sequence("a", PROMPTS[0], sampling=sampling, stop=StopParams(9, 0, (END,)))
    await grammars.constrain(wanted)
    assert wanted.constraint is not None
    assert wanted.constraint.num_tokens == 0


async def test_without_a_tokenizer_a_grammar_is_refused():
    wanted = make_sequence("a", PROMPTS[0], sampling=SamplingParams(grammar=GRAMMARS[0]))
    with pytest.raises(InvalidRequestError, match="without a tokenizer"):
        await Grammars(no_vocabulary).constrain(wanted)
