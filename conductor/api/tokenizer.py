"""Text to token ids and back, by the `tokenizers` library: the conductor imports no torch.

Generated text is put together from the *bytes* of tokens, by one incremental UTF-8
decoder per sequence, and not by the library's `DecodeStream`. A character may be spread
over several tokens, so text is only whole where bytes are; and `DecodeStream` decodes
everything since its last whole character once more for each token, and raises when a run
of byte tokens turns out to be no UTF-8 ("Invalid prefix encountered"), which any model
can be made to sample. Bytes are exact, cost a table look-up, and are what the `bytes`
field of OpenAI's logprobs wants as well.

What a token's bytes are depends on the tokenizer's decoder. Three families cover the
decoder-only models: byte-level (GPT-2, Llama 3, Qwen, ...), SentencePiece with byte
fallback (Llama 2, Gemma, ...) and Metaspace. Any other is refused at start.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers

from base.errors import ConfigError, InvalidRequestError
from conductor.api.text_slices import SLICE_CHARS, slices

MOST_GROWTH = 64
"""Characters that a normalizer may make of one, and tokens that may go around a text: bounds on a request are
those of its characters."""
PART_CHARS = 64
"""The cost of a part that is encoded apart, however short it is, in characters of a long one."""
SAMPLE = "Don't  stop 1234 at 3.14!?\n\n\tdef f(x):\n        return 'é' * x  # 日本語 😀😀 \r\n" * 5
SAMPLE_SLICE_CHARS = 300
SENTENCEPIECE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PLAIN_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class ContextLengthError(InvalidRequestError):
    """Prompt and answer do not fit the model's context window."""


class Tokenizer:
    """A model's tokenizer.json. Reading only; any thread may use it."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Take over `tokenizer`; raises ConfigError if its decoder belongs to none of the known families."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        bare = _without_vocabulary(tokenizer)
        self._is_byte_level = _is_byte_level(bare["decoder"])
        if bare["normalizer"] is not None and _growth(bare["normalizer"]) > MOST_GROWTH:
            # "a" to a thousand of them
            message = f"it makes more than {MOST_GROWTH} characters of one"
            raise ConfigError(f"tokenizer.json: normalizer: {message}")
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # A name of one character cannot be cut.
        self._special = _any_of(
            token.content for token in added.values() if token.special and len(token.content) > 1
        )
        self._names = _any_of(token.content for token in added.values())
        self._max_name_chars = max((len(token.content) for token in added.values()), default=0)
        self._bytes_of: dict[int, bytes] = {}
        self._max_token_chars = max(map(len, tokenizer.get_vocab()), default=1)
        self._is_sliced = self._is_sliceable()
        self._before, self._after = self._around()
        if len(self._before) + len(self._after) > MOST_GROWTH:
            raise ConfigError(f"tokenizer.json: post_processor: more than {MOST_GROWTH} tokens around a text")

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read `folder`/tokenizer.json; raises ConfigError if there is none or it is unusable."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path} is missing: a model folder needs one")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except ConfigError:
            raise
        except BaseException as error:  # of Rust's panics, which are no Exception, the name alone is known
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            raise ConfigError(f"{path}: the tokenizer cannot be read: {error}") from error

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def token_id_or_none(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, or None if there is no such token."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def encode(
        self, text: str, add_special_tokens: bool, cut: str = "", max_model_len: int | None = None
    ) -> tuple[int, ...]:
        """Return the token ids of `text`.

        Args:
            text: Names of special tokens in it become those tokens.
            add_special_tokens: Whether the model's own (a begin-of-sequence token, mostly) go
                around it. Chat templates write them out, so not for their output.
            cut: The mark of `with_specials_cut`; the parts between marks are encoded apart.
            max_model_len: Tokens of the context window, which has room for one more than those of `text`.

        Raises:
            ContextLengthError: the text fills the context window; it is not encoded much further.
            InvalidRequestError: a word is longer than a slice may be.
        """
        if not self._is_sliced or len(text) <= SLICE_CHARS:
            found = tuple(self._encoded(text.split(cut) if cut else [text], add_special_tokens))
            _require_fits(len(found), max_model_len)
            return found
        token_ids = array("I", self._before if add_special_tokens else ())
        for batch in self._batches(text, cut):
            token_ids.extend(self._encoded(batch, add_special_tokens=False))
            # A tuple takes nine times the memory of this array: a text that is too long gets none.
            _require_fits(len(token_ids), max_model_len)
        return (*token_ids, *(self._after if add_special_tokens else ()))

    def _encoded(self, parts: Sequence[str], add_special_tokens: bool) -> Iterable[int]:
        # The batch call lets other threads run meanwhile; `encode` does not.
        try:
            encodings = self._tokenizer.encode_batch_fast(parts, add_special_tokens=add_special_tokens)
        except BaseException as error:
            if not _is_panic(error):
                raise
            # Such as a pattern that tries too often.
            raise InvalidRequestError(f"the model's tokenizer gives this text up: {error}") from error
        return chain.from_iterable(encoding.ids for encoding in encodings)

    def _batches(self, text: str, cut: str) -> Iterator[list[str]]:
        """Yield parts that are encoded apart, in lists of about a slice's length."""
        batch: list[str] = []
        size = at = 0
        while at <= len(text):
            end = text.find(cut, at) if cut else len(text)
            end = len(text) if end < 0 else end
            for part in self._sliced(text if not cut else text[at:end], SLICE_CHARS):
                batch.append(part)
                size += len(part) + PART_CHARS
                if size > SLICE_CHARS:
                    yield batch
                    batch, size = [], 0
            at = end + max(1, len(cut))
        yield batch

    def _sliced(self, text: str, slice_chars: int) -> Iterator[str]:
        pieces = self._tokenizer.pre_tokenizer.pre_tokenize_str
        return slices(text, self._names, self._max_name_chars, pieces, slice_chars)

    def _is_sliceable(self) -> bool:
        """Say whether slices have the tokens of the whole, as far as a sample shows."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        # What is taken from beside a name, or changed before it is cut into pieces, may be cut off from it.
        has_edges = any(token.lstrip or token.rstrip or token.single_word for token in added)
        if has_edges or self._tokenizer.pre_tokenizer is None or self._tokenizer.normalizer is not None:
            return False
        sample = SAMPLE + SAMPLE.join(token.content for token in list(added)[:8]) + SAMPLE
        try:
            parts = list(self._sliced(sample, SAMPLE_SLICE_CHARS))
        except InvalidRequestError:
            return False
        return len(parts) > 1 and [*self._encoded(parts, False)] == [*self._encoded([sample], False)]

    def _around(self) -> tuple[list[int], list[int]]:
        """Return the model's own tokens that go before and after a text."""
        inner, whole = [*self._encoded(["a"], False)], [*self._encoded(["a"], True)]
        count = len(whole) - len(inner)
        before = next((at for at in range(count + 1) if whole[at : at + len(inner)] == inner), 0)
        return whole[:before], whole[before + len(inner) :]

    def with_specials_cut(self, text: str, cut: str, most: int | None = None) -> str:
        """Return `text` with the mark `cut` within each name of a special token, so that it stays text.

        Raises ContextLengthError where there are more than `most`: each is a token at least.
        """
        parts: list[str] = []
        begin = 0
        found = self._special.search(text)
        while found is not None:
            _require_fits(len(parts), most)
            # The next search begins one character later: names may overlap.
            parts.append(text[begin : found.start() + 1])
            begin = found.start() + 1
            found = self._special.search(text, begin)
        return cut.join([*parts, text[begin:]])

    def min_tokens(self, text: str) -> int:
        """Return about how many tokens `text` has at least, without encoding it.

        It errs only for text that the tokenizer drops (spaces about some added tokens).
        """
        return len(text) // self._max_token_chars

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of a whole sequence of token ids."""
        if self._is_byte_level:
            # The library makes a text of each token first, of sixty bytes and more.
            left_out = self._special_ids if skip_special_tokens else ()
            shown = (token_id for token_id in token_ids if token_id not in left_out)
            return b"".join(map(self.token_bytes, shown)).decode(errors="replace")
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def specials_within(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the special tokens whose names stand in one of `texts`."""
        whole = "\n".join(texts)
        names = ((token_id, self._tokenizer.id_to_token(token_id)) for token_id in self._special_ids)
        return frozenset(token_id for token_id, name in names if name and name in whole)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text, as UTF-8 that may begin or end inside a character.

        An id without a token adds nothing: models pad their vocabulary.
        """
        found = self._bytes_of.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id)
            found = b"" if token is None else self._spelled(token)
            self._bytes_of[token_id] = found
        return found

    def _spelled(self, token: str) -> bytes:
        if self._is_byte_level:
            try:
                return bytes(_BYTE_OF[char] for char in token)
            except KeyError:
                # An added token is spelled as it is.
                return token.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(SENTENCEPIECE_SPACE, " ").encode()


class Detokenizer:
    """The text of one sequence, token by token. Owned by the event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        kept_token_ids: Set[int] = frozenset(),
    ) -> None:
        """Begin. `kept_token_ids`: special tokens that are not left out."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._kept = kept_token_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that is whole now; an unfinished character waits for its rest."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id) and token_id not in self._kept:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """Return what waited in vain: U+FFFD for an unfinished character, or nothing."""
        return self._decoder.decode(b"", final=True)


def prompt_too_long(num_tokens: int, max_model_len: int) -> ContextLengthError:
    return ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens. However, your messages resulted in "
        f"at least {num_tokens} tokens, and one is for the answer. Please reduce the length of the prompt.",
        "prompt",
    )


def _require_fits(num_tokens: int, max_model_len: int | None) -> None:
    if max_model_len is not None and num_tokens >= max_model_len:
        raise prompt_too_long(num_tokens, max_model_len)


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds each of `names`, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


def _is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of Rust, which is no Exception."""
    return type(error).__name__ == "PanicException"


def _without_vocabulary(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return a tokenizer.json without the vocabulary, which takes a second to write down and read again."""
    bare = tokenizers.Tokenizer(tokenizers.models.BPE())
    if tokenizer.decoder is not None:
        bare.decoder = tokenizer.decoder
    if tokenizer.normalizer is not None:
        bare.normalizer = tokenizer.normalizer
    described: dict[str, Any] = json.loads(bare.to_str())
    return described


def _growth(step: dict[str, Any]) -> int:
    """Return the characters that a normalizer makes of one at most, by what it puts in."""
    if step["type"] == "Sequence":
        return math.prod(map(_growth, step["normalizers"]))
    return max(1, len(step.get("content") or step.get("prepend") or ""))


def _is_byte_level(decoder: Any) -> bool:
    """Say to which family a decoder belongs; raises ConfigError if to none."""
    steps = _step_names(decoder)
    if steps == {"ByteLevel"}:
        return True
    if steps and steps <= _PLAIN_STEPS:
        return False
    raise ConfigError(
        f"tokenizer.json: decoder {sorted(steps) or None} is not supported; "
        f"known: ByteLevel, or a sequence of {sorted(_PLAIN_STEPS)}"
    )


def _step_names(decoder: Any) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return {name for step in decoder["decoders"] for name in _step_names(step)}
    return {decoder["type"]}


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for bytes: printable ones stand for themselves, the others
    for U+0100 and up in their order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _byte_level_alphabet()
