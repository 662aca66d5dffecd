from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.api.text_stream import TextStream
from conductor.api.tokenizer import Detokenizer, Tokenizer
from tests.conductor.fakes import byte_level_tokenizer

TOKENIZER = Tokenizer(byte_level_tokenizer())

# Few letters, so that stop strings occur, overlap and nearly occur all the time.
texts = st.text("abé🎉", max_size=30)
stops = st.lists(st.text("abé🎉", min_size=1, max_size=4), max_size=3).map(tuple)


def stream(stop: tuple[str, ...], include_stop: bool = False, min_tokens: int = 0) -> TextStream:
    return TextStream(Detokenizer(TOKENIZER), stop, include_stop, min_tokens)


def pushed(text: str, stream: TextStream) -> list[str]:
    pieces = [stream.push(token_id) for token_id in TOKENIZER.encode(text, add_special_tokens=False)]
    return [*pieces, stream.finish()]


def cut(text: str, stop: tuple[str, ...], include_stop: bool) -> str:
    """The rule in one line each: end at the first complete stop string, the longest of them."""
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(item) for item in stop)]
    if not ends:
        return text
    longest = max(len(item) for item in stop if text[: ends[0]].endswith(item))
    return text[: ends[0] if include_stop else ends[0] - longest]


@settings(deadline=None)
@given(texts, stops, st.booleans())
def test_streamed_text_is_the_whole_text_cut(text, stop, include_stop):
    assert "".join(pushed(text, stream(stop, include_stop))) == cut(text, stop, include_stop)


@settings(deadline=None)
@given(texts, stops)
def test_nothing_of_a_stop_string_is_shown_before_it_is_complete(text, stop):
    whole = cut(text, stop, include_stop=False)
    shown = ""
    for piece in pushed(text, stream(stop)):
        shown += piece
        assert whole.startswith(shown)


@settings(deadline=None)
@given(st.lists(texts, max_size=6), stops)
def test_text_is_cut_alike_however_it_is_split(parts, stop):
    """A stream that gets several characters at once, as from tokens of many characters."""

    class Spoken:
        def push(self, token_id: int) -> str:
            return parts[token_id]

        def finish(self) -> str:
            return ""

    split = TextStream(Spoken(), stop)
    shown = "".join(split.push(index) for index in range(len(parts))) + split.finish()
    assert shown == cut("".join(parts), stop, include_stop=False)


def test_text_waits_only_while_it_may_begin_a_stop_string():
    assert pushed("xEN ENx", stream(("END",))) == ["x", "", "", "EN ", "", "", "ENx", ""]


def test_text_held_back_at_the_end_is_shown():
    assert pushed("aEN", stream(("END",)))[-1] == "EN"


def test_stop_string_is_found_across_tokens_and_characters_of_several_bytes():
    assert "".join(pushed("ab🎉🎉c", stream(("b🎉🎉",)))) == "a"


def test_tokens_below_the_minimum_are_not_searched():
    assert "".join(pushed("abab", stream(("b",), min_tokens=2))) == "aba"


def test_nothing_comes_after_a_stop_string():
    stopped = stream(("b",))
    pieces = pushed("abccc", stopped)
    assert stopped.is_stopped
    assert pieces == ["a", "", "", "", "", ""]


@pytest.mark.parametrize("count", [1, 4])
def test_search_looks_at_what_is_held_and_not_at_all_that_was_said(count):
    """The held text is never longer than the longest stop string."""
    text = "ab" * 200
    pieces = pushed(text, stream(("ab" * count + "x",)))
    shown = 0
    for said, piece in enumerate(pieces[:-1], start=1):
        shown += len(piece)
        assert said - shown <= 2 * count
    assert all(left or right for left, right in pairwise(pieces[2 * count :]))
