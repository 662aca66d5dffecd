"""Log probabilities of a prompt as numbers in bytes: the same wherever they are cut; bad ones are refused."""

from array import array

import pytest

from base.errors import ProtocolError
from base.prompt_logprobs import PromptLogprobs
from base.request import SampledToken, TokenLogprobs

PROMPT = list(range(10, 20))


def numbers(count, num_top, start=0):
    values = array("f", [-0.5 * at for at in range(start, start + count)])
    ids = array("I", range(start * num_top, (start + count) * num_top))
    return PromptLogprobs(values.tobytes(), ids.tobytes(), array("f", map(float, ids)).tobytes())


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_parts_are_those_of_the_whole(num_top):
    whole = numbers(9, num_top)
    tokens = list(whole.tokens(PROMPT, 0, 10))
    assert tokens[0] == SampledToken(10)
    tops = tuple((2 * num_top + at, float(2 * num_top + at)) for at in range(num_top))
    assert tokens[3] == SampledToken(13, TokenLogprobs(-1.0, tops))
    for cut in range(11):
        assert [*whole.tokens(PROMPT, 0, cut), *whole.tokens(PROMPT, cut, 10)] == tokens


@pytest.mark.parametrize("num_known", [0, 2, 4])
def test_what_is_computed_again_is_counted_once(num_known):
    first, again = numbers(4, 2), numbers(5 + num_known, 2, start=4 - num_known)
    assert first.extended(again, num_known) == numbers(9, 2)


def test_a_prompt_of_one_token_has_none():
    assert PromptLogprobs().tokens(PROMPT, 0, 1) == (SampledToken(10),)


@pytest.mark.parametrize(
    "bad",
    [
        PromptLogprobs(b"123", b"", b""),
        PromptLogprobs(b"1234", b"1234", b""),
        PromptLogprobs(b"", b"1234", b"1234"),
        PromptLogprobs(b"12345678", b"1234", b"1234"),
        PromptLogprobs(b"1234", b"1234" * 21, b"1234" * 21),
    ],
)
def test_numbers_of_no_prompt_are_refused(bad):
    with pytest.raises(ProtocolError, match="prompt_logprobs"):
        bad.check()
