"""A long text is encoded in slices: into the tokens of the whole, and no further than a context window."""

import re
import tracemalloc
from dataclasses import replace

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, processors

from base.errors import InvalidRequestError
from conductor.api.chat_template import ChatMessage
from conductor.api.prompt import chat_token_ids
from conductor.api.text_slices import MAX_PIECE_CHARS, SLICE_CHARS, slices
from conductor.api.tokenizer import ContextLengthError, Tokenizer
from tests.conductor.fakes import MAX_MODEL_LEN, SPECIAL, byte_level_tokenizer, serving, spoken


def cutting_library():
    """The tokenizer of the tests, whose words are GPT-2's."""
    library = byte_level_tokenizer()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return library


LIBRARY = cutting_library()
TOKENIZER = Tokenizer(LIBRARY)
NAMES = re.compile("|".join(map(re.escape, SPECIAL)))
UNITS = [
    "a",
    "hello ",
    " ",
    "  ",
    "\n",
    "\r\n",
    "é",
    "e\u0301",
    "😀",
    "12",
    "'s",
    "'",
    "!!",
    "日本",
    "\u3000",
    "<|",
    *SPECIAL,
]


def sliced(text: str, slice_chars: int) -> list[str]:
    return list(slices(text, NAMES, 12, LIBRARY.pre_tokenizer.pre_tokenize_str, slice_chars))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(UNITS), st.integers(1, 3)), max_size=400))
def test_slices_have_the_tokens_of_the_whole(units):
    text = "".join(unit * count for unit, count in units)
    parts = sliced(text, 300)
    assert "".join(parts) == text
    ids = [token_id for part in parts for token_id in LIBRARY.encode(part).ids]
    assert ids == LIBRARY.encode(text).ids


def test_a_long_text_has_the_same_tokens_with_the_models_own_around_it():
    library = cutting_library()
    library.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[1]} $A {SPECIAL[2]}", special_tokens=[(SPECIAL[1], 1), (SPECIAL[2], 2)]
    )
    text = "hello world, 'tis 12 é😀\n" * 3_000
    for add_special_tokens in (True, False):
        expected = library.encode(text, add_special_tokens=add_special_tokens).ids
        assert list(Tokenizer(library).encode(text, add_special_tokens)) == expected


def test_marks_that_cut_special_tokens_are_kept_to_in_a_long_text():
    text, cut = "say <|im_end|> and go on " * 2_000, "cut0123456789"
    token_ids = TOKENIZER.encode(TOKENIZER.with_specials_cut(text, cut), False, cut)
    assert not any(map(TOKENIZER.is_special, token_ids))
    assert TOKENIZER.decode(token_ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("unit", ["a ", "<|im_end|>", "é! "])
@pytest.mark.parametrize("cut", ["", "<|"])
def test_a_text_that_is_too_long_is_not_encoded_much_further(unit, cut):
    with pytest.raises(ContextLengthError) as refused:
        TOKENIZER.encode(unit * 300_000, False, cut, max_model_len=100)
    assert 100 <= int(re.search(r"at least (\d+) tokens", str(refused.value))[1]) <= 100 + 2 * SLICE_CHARS


def test_a_text_that_is_too_long_is_never_held_as_objects():
    text = "a " * 300_000
    tracemalloc.start()
    try:
        with pytest.raises(ContextLengthError):
            TOKENIZER.encode(text, False, max_model_len=200_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A tuple of them takes eight bytes for each, and 28 for each number.
    assert peak < 200_000 * 16


def test_a_tokenizer_without_words_encodes_the_whole():
    whole = byte_level_tokenizer()
    text = "hello world " * 2_500
    assert list(Tokenizer(whole).encode(text, False)) == whole.encode(text).ids


async def test_a_text_without_a_break_is_refused(model):
    text = "a" * (MAX_PIECE_CHARS + 1)
    with pytest.raises(InvalidRequestError, match="without a break") as refused:
        TOKENIZER.encode(text, False)
    assert refused.value.param == "prompt"


async def test_half_as_much_of_wide_characters_without_a_break_is_refused(model):
    TOKENIZER.encode("a" * 20_000, False)
    with pytest.raises(InvalidRequestError, match="more than 16384 characters without a break"):
        TOKENIZER.encode("\N{GRINNING FACE}" * 20_000, False)


async def test_a_long_conversation_is_refused_before_it_is_rendered(model):
    rendered = []

    class Template:
        has_tools = False

        def render(self, *given):
            rendered.append(given)
            return ""

    seen = replace(model, chat_template=Template())
    messages = [ChatMessage("user", "a <|im_end|>" * MAX_MODEL_LEN)] * 2
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        await chat_token_ids(seen, messages)
    assert not rendered
    assert not await chat_token_ids(seen, [ChatMessage("user", "a")])
    assert rendered


async def test_the_client_of_a_long_text_is_told_of_the_context_window(model):
    async with (
        serving(model, lambda request: spoken(model, "no")) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        answer = await client.post("/tokenize", json={"prompt": "a " * MAX_MODEL_LEN * 100})
    assert answer.status_code == 400
    assert "maximum context length" in answer.json()["error"]["message"]
