"""The bench of precision measures what it says: neither channels in another order nor the cache change it."""

import math
import zlib

import pytest
import torch
from torch.nn.functional import cross_entropy

from bench.precision import TEXT as TEXT_FILE
from bench.precision import WINDOW, Reader, Text, Work, compared, shuffle_channels
from engine.model import PagedModel
from engine.scaled_kv import scaled_layout
from tests.engine.test_gpu_model import make_family

TEXT = [(index * index * 7 + 3) % 199 for index in range(WINDOW + 5)]
WORK = Work(Text(TEXT, []), [TEXT[:9], TEXT[9:30]], 4)


def reader(family: str, is_scaled: bool = False) -> Reader:
    model = PagedModel(make_family(family))
    return Reader(model, scaled_layout(model.shape) if is_scaled else model.shape)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@torch.inference_mode()
def test_channels_in_another_order_say_the_same(family: str) -> None:
    model = make_family(family)
    token_ids = torch.tensor([TEXT[:40]])
    expected = model(token_ids).logits
    before = model.model.layers[0].mlp.down_proj.weight.clone()
    shuffle_channels(model)
    assert not torch.equal(model.model.layers[0].mlp.down_proj.weight, before)
    torch.testing.assert_close(model(token_ids).logits, expected, rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def test_perplexity_is_that_of_whole_windows() -> None:
    window = torch.tensor([TEXT[:WINDOW]])
    loss = cross_entropy(make_family("llama")(window).logits[0, :-1], window[0, 1:])
    assert reader("llama").perplexity(WORK.text) == pytest.approx(math.exp(loss), rel=1e-4)


def test_each_window_begins_with_what_the_tokenizer_puts_before_a_text() -> None:
    windows = list(Text(TEXT, [7]).windows())
    assert windows == [[7, *TEXT[: WINDOW - 1]]]
    assert list(Text(TEXT * 2, [7]).windows())[1] == [7, *(TEXT * 2)[WINDOW - 1 : 2 * WINDOW - 2]]


@torch.inference_mode()
def test_a_model_agrees_with_itself_and_not_quite_with_kv_of_8_bits() -> None:
    floats = reader("llama")
    perplexity, expected = floats.perplexity(WORK.text), floats.answers(WORK.prompts, WORK.count)
    same = compared(floats, WORK, expected, perplexity)
    assert same["greedy_match"] == same["perplexity_of_floats"] == 1.0
    assert same["tokens_until_another"] == WORK.count
    scaled = compared(reader("llama", is_scaled=True), WORK, expected, perplexity)
    assert 0 < scaled["mean_log_probability_error"] < 0.5


def test_the_text_stays_what_it_was() -> None:
    """Figures of different commits compare; a change of the text wants all of them measured again."""
    assert zlib.crc32(TEXT_FILE.read_bytes()) == 2272034863
