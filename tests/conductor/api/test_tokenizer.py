import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from base.errors import ConfigError, InvalidRequestError
from conductor.api.tokenizer import Detokenizer, Tokenizer
from tests.conductor.fakes import byte_level_tokenizer

BYTE_LEVEL = Tokenizer(byte_level_tokenizer())


def sentencepiece_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes; then a word with a space before it, and a special token."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁wide": 256, "a": 257, "<s>": 258}
    library = Library(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    library.add_special_tokens(["<s>"])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(library)


def detokenized(tokenizer: Tokenizer, token_ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


@settings(deadline=None)
@given(st.text())
def test_text_survives_the_way_to_tokens_and_back(text):
    token_ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert "".join(detokenized(BYTE_LEVEL, list(token_ids), skip_special_tokens=False)) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1)), st.booleans())
def test_any_tokens_become_the_text_that_the_library_decodes_at_once(token_ids, skip):
    text = byte_level_tokenizer().decode(token_ids, skip_special_tokens=skip)
    assert BYTE_LEVEL.decode(token_ids, skip) == text
    assert "".join(detokenized(BYTE_LEVEL, token_ids, skip)) == text


def test_character_spread_over_tokens_appears_with_its_last_byte():
    token_ids = BYTE_LEVEL.encode("é🎉", add_special_tokens=False)
    assert detokenized(BYTE_LEVEL, list(token_ids)) == ["", "é", "", "", "", "🎉", ""]


def test_unfinished_character_is_replaced_only_at_the_end():
    token_ids = BYTE_LEVEL.encode("x🎉", add_special_tokens=False)[:-1]
    assert detokenized(BYTE_LEVEL, list(token_ids)) == ["x", "", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_bytes_that_are_no_text_do_not_stop_a_byte_fallback_tokenizer():
    token_ids = [*"你".encode(), 0xFF, *"好".encode(), 257]
    assert "".join(detokenized(sentencepiece_tokenizer(), token_ids)) == "你\N{REPLACEMENT CHARACTER}好a"


def test_sentencepiece_word_keeps_the_space_that_parts_it_from_the_prompt():
    assert "".join(detokenized(sentencepiece_tokenizer(), [256, 258, 257])) == " widea"


def test_token_of_a_padded_vocabulary_adds_nothing():
    assert detokenized(BYTE_LEVEL, [BYTE_LEVEL.vocab_size + 5]) == ["", ""]


def test_tokenizer_of_another_family_is_refused_by_name():
    library = byte_level_tokenizer()
    library.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        Tokenizer(library)


@pytest.mark.parametrize("times", [1, 12])
def test_tokenizer_that_makes_much_of_a_little_is_refused(times):
    library = byte_level_tokenizer()
    content = "aa" if times > 1 else "a" * 1000
    library.normalizer = normalizers.Sequence([normalizers.Replace("a", content)] * times)
    with pytest.raises(ConfigError, match="normalizer: it makes more than 64 characters of one"):
        Tokenizer(library)
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁▁")])
    assert Tokenizer(library).encode("a", add_special_tokens=False)


def test_tokenizer_that_puts_much_around_a_text_is_refused():
    library = byte_level_tokenizer()
    around = [("<|im_end|>", library.token_to_id("<|im_end|>"))]
    library.post_processor = processors.TemplateProcessing("<|im_end|> " * 100 + "$A", None, around)
    with pytest.raises(ConfigError, match="post_processor: more than 64 tokens around a text"):
        Tokenizer(library)


def test_text_that_the_library_gives_up_is_the_callers_error():
    library = byte_level_tokenizer()
    steps = [
        pre_tokenizers.Split(Regex("(q+)+$"), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    with pytest.raises(InvalidRequestError, match="tokenizer gives this text up"):
        Tokenizer(library).encode("q" * 40 + "!", add_special_tokens=False)


def test_folder_without_a_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)


@settings(deadline=None)
@given(st.text(min_size=1))
def test_tokens_are_never_fewer_than_estimated(text):
    assert BYTE_LEVEL.min_tokens(text) <= len(BYTE_LEVEL.encode(text, add_special_tokens=False))
