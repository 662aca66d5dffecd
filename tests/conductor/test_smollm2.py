"""Tokeniser and chat template of a real model, against transformers' own."""

from pathlib import Path

import pytest

from conductor.chat_template import ChatMessage
from conductor.served_model import ServedModel, load_served_model
from conductor.tokenizer import Detokenizer
from engine.model_store import prepare

CACHE_DIR = Path("~/.cache/conductor-cluster")

CONVERSATIONS = [
    [("user", "hello")],
    [("system", "Be brief."), ("user", "¿Qué tal? 你好 🎉")],
    [("user", "a"), ("assistant", "b\n\n"), ("user", "  c  <|im_end|> d")],
    [("user", "")],
    [("user", "def f():\n\treturn '\\x00'\r\n" * 50)],
]
TEXTS = [
    "plain words, and some more of them.",
    "naïve façade \N{EN DASH} “quotes” … £5 ½",
    "日本語とロシア語 Русский العربية हिन्दी",
    "🙂🙃👩‍👩‍👧‍👦 e\u0301 \u200b|",
    " leading, trailing  \n\n\t spaces ",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(prepare("smollm2", CACHE_DIR, lambda line: None).path)


@pytest.fixture(scope="module")
def served(folder) -> ServedModel:
    return load_served_model(folder, "smollm2")


@pytest.fixture(scope="module")
def reference(folder):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("turns", CONVERSATIONS)
@pytest.mark.parametrize("opens", [True, False])
def test_conversation_becomes_the_same_text_and_tokens(served, reference, turns, opens):
    messages = [{"role": role, "content": content} for role, content in turns]
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
    text = served.chat_template.render([ChatMessage(*turn) for turn in turns], opens)
    assert text == expected
    token_ids = reference.apply_chat_template(messages, add_generation_prompt=opens)["input_ids"]
    assert list(served.tokenizer.encode(text, add_special_tokens=False)) == token_ids


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_text_becomes_the_same_tokens_and_comes_back_the_same(served, reference, text, skip):
    token_ids = reference(f"<|im_start|>{text}<|im_end|>")["input_ids"]
    assert list(served.tokenizer.encode(f"<|im_start|>{text}<|im_end|>", True)) == token_ids
    expected = reference.decode(token_ids, skip_special_tokens=skip)
    detokenizer = Detokenizer(served.tokenizer, skip)
    streamed = "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()
    assert streamed == expected == served.tokenizer.decode(token_ids, skip)


def test_every_token_of_the_vocabulary_streams_as_it_decodes(served, reference):
    token_ids = list(range(served.vocab_size))
    detokenizer = Detokenizer(served.tokenizer, skip_special_tokens=False)
    streamed = "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()
    assert streamed == reference.decode(token_ids)


def test_limits_and_end_are_the_models(served):
    assert (served.max_model_len, served.vocab_size, served.eos_token_ids) == (8192, 49152, (2,))
