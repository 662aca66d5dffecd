"""Grammars over the tokens of a model: compiled, and followed token by token. The door of llguidance.

What may come next is a function of the grammar and of the tokens generated so far, and of nothing else. So a
sequence that goes on on another node, or after preemption, is followed again from its tokens, and any two
processes agree on it.

A grammar says when an answer may end; which tokens end it is the request's to say. The library knows one end
token, a special one of the vocabulary. Where it allows that, the stop tokens of the request are allowed, and
only there, unless the grammar has them as text.

All limits are of work and not of time: what one process compiles, every other one does.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark
from numpy.typing import NDArray

from base.errors import ConfigError, InvalidRequestError
from base.request import MAX_GRAMMAR_CHARS, Grammar, GrammarKind, StopParams

MAX_SHOWN_CHARS = 300
MAX_COMPILED = 64
"""Number of grammars that a process keeps compiled; those used longest ago go."""
MAX_COMPILED_CHARS = 1 << 20
"""Characters of all of them."""

WHITESPACE = r"( |\n[ \t]{0,32})?"
"""Space between the parts of a JSON text, little enough that no model goes on with it for ever."""

LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=10_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Bounds of compiling a grammar and of each of its steps, in units of the library's."""

Masks = NDArray[np.int32]
"""[rows, words]: bit `i` of a row, from the lowest of its first word on, is whether token `i` may come."""


class Constraint:
    """Where one sequence is in its grammar. Belongs to one thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary, stop: StopParams) -> None:
        self.matcher = matcher
        self.vocabulary = vocabulary
        self._min_tokens = stop.min_tokens
        self._stop_token_ids = frozenset(stop.stop_token_ids)
        self.num_tokens = 0
        """Generated tokens that were followed."""
        self.is_over = False
        """Whether a token that ends the sequence was followed."""
        self.error = ""
        """Why it cannot be followed any further; empty: it can."""

    def follow(self, token_ids: Iterable[int]) -> None:
        """Take in the tokens generated after those that were followed already."""
        for token_id in token_ids:
            if self.error or self.is_over:
                return
            self.num_tokens += 1
            if token_id in self._stop_token_ids:
                self.is_over = True
            elif not self.matcher.consume_token(token_id):
                self._fail()

    def finish(self, mask: Masks) -> None:
        """Make of the library's mask, [words], the one of the tokens that may come next.

        Where nothing can be followed, all may: nobody takes what is sampled."""
        if not self.error and self.matcher.is_error():
            self._fail()
        if self.error or self.is_over:
            mask[:] = -1
            return
        may_end = self.vocabulary.take_end(mask)
        # What is complete and cannot go on ends, whatever the least number of tokens is.
        if may_end and not (self.num_tokens < self._min_tokens and mask.any()):
            for token_id in self._stop_token_ids:
                mask[token_id >> 5] |= _bit(token_id)

    def _fail(self) -> None:
        reason = _shown(self.matcher.get_error().partition("\n")[0])
        self.error = f"the grammar cannot be followed after {self.num_tokens} tokens: {reason}"


class MaskFiller:
    """Computes the masks of several sequences at once. Belongs to one thread."""

    def __init__(self, num_threads: int) -> None:
        self._executor = llguidance.LLExecutor(num_threads)

    def fill(self, constraints: Sequence[Constraint], masks: Masks) -> None:
        """Write to the first rows of `masks`, contiguous [rows, words], what may come next in each."""
        open_rows = [
            (item.matcher, row) for row, item in enumerate(constraints) if not item.error and not item.is_over
        ]
        row_bytes = masks.shape[1] * masks.itemsize
        if open_rows:
            self._executor.unsafe_compute_mask_ptr(open_rows, masks.ctypes.data, row_bytes, len(masks))
        for constraint, mask in zip(constraints, masks, strict=False):
            constraint.finish(mask)


class Vocabulary:
    """The tokens of a model as grammars see them, and what is compiled for them.

    One thread compiles and begins sequences; any may finish masks."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, end_id: int) -> None:
        """Take over `tokenizer`; `end_id` is what it takes for the end of a sequence."""
        self._tokenizer = tokenizer
        self._end_word, self._end_bit = end_id >> 5, _bit(end_id)
        self._compiled: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()
        self._num_chars = 0
        self.num_words: int = (tokenizer.vocab_size + 31) // 32
        """Length of a mask."""

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> Vocabulary:
        """Read `folder`/tokenizer.json, for a model that has logits of `vocab_size` tokens.

        Raises ConfigError if grammars cannot be had with this tokenizer."""
        path = folder / "tokenizer.json"
        try:
            text = path.read_text()
            table = json.loads(text)
            specials = [token["id"] for token in table["added_tokens"] if token["special"]]
            size = 1 + max(
                *table["model"]["vocab"].values(), *(token["id"] for token in table["added_tokens"])
            )
            tokenizer = llguidance.LLTokenizer(text, n_vocab=max(vocab_size, size), eos_token=specials[0])
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: grammars cannot be had with it: {error}") from error
        return cls(tokenizer, specials[0])

    def compile(self, grammar: Grammar) -> None:
        """Compile `grammar`, unless it is; raises InvalidRequestError that says what is wrong with it."""
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
            return
        self._compiled[grammar] = compile_grammar(grammar, self._tokenizer)
        self._num_chars += len(grammar.source)
        while len(self._compiled) > MAX_COMPILED or self._num_chars > MAX_COMPILED_CHARS:
            self._num_chars -= len(self._compiled.popitem(last=False)[0].source)

    def constraint(self, grammar: Grammar, stop: StopParams) -> Constraint:
        """Return the beginning of a sequence under `grammar`; raises InvalidRequestError, as `compile`."""
        self.compile(grammar)
        return Constraint(self._compiled[grammar].deep_copy(), self, stop)

    def __contains__(self, grammar: Grammar) -> bool:
        """Say whether `grammar` is compiled."""
        return grammar in self._compiled

    def take_end(self, mask: Masks) -> bool:
        """Take the library's end token out of a mask, and return whether it was there."""
        found = bool(mask[self._end_word] & self._end_bit)
        mask[self._end_word] &= ~self._end_bit
        return found


def _bit(token_id: int) -> np.int32:
    return np.uint32(1 << (token_id & 31)).astype(np.int32)


def _shown(message: str) -> str:
    """Return the library's message on one line; it repeats the grammar, however long that is."""
    line = " ".join(message.split())
    return line if len(line) <= MAX_SHOWN_CHARS else f"{line[:MAX_SHOWN_CHARS]}..."


def compile_grammar(grammar: Grammar, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """Compile a grammar; raises InvalidRequestError that says what is wrong with it."""
    if len(grammar.source) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"at most {MAX_GRAMMAR_CHARS} characters, not {len(grammar.source)}")
    try:
        source = library_source(grammar)
    except ValueError as error:
        raise InvalidRequestError(_shown(str(error))) from None
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise InvalidRequestError(_shown(matcher.get_error()))
    return matcher


def library_source(grammar: Grammar) -> str:
    """Return a grammar as the library takes it; raises ValueError for what is no JSON."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return llguidance.LLMatcher.grammar_from_json_schema(
                grammar.source,
                overrides={"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False},
            )
        case GrammarKind.REGEX:
            return llguidance.LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.LARK:
            return llguidance.LLMatcher.grammar_from_lark(grammar.source)


def lark_of(grammar: Grammar) -> Grammar:
    """Return a grammar in Lark's notation, whose source may be in llama.cpp's; raises InvalidRequestError."""
    try:
        return grammar._replace(source=any_to_lark(grammar.source))
    except (GbnfToLarkError, ValueError, LookupError, AssertionError, RecursionError) as error:
        raise InvalidRequestError(
            f"it is neither Lark's notation nor llama.cpp's: {_shown(str(error))}"
        ) from None
