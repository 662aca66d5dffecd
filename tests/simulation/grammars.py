"""Grammars of the simulated model: a vocabulary of letters, and which token comes where one holds."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import numpy as np

from base.grammar import MaskFiller, Vocabulary
from base.request import Grammar, GrammarKind, StopParams

VOCAB = 50
END = VOCAB - 1
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWX"[:END]
GRAMMARS = (
    Grammar(GrammarKind.REGEX, "([a-e][f-k]){2,30}"),
    Grammar(GrammarKind.REGEX, "[A-K]{3}([a-z]{4}[L-P]){1,9}"),
    Grammar(GrammarKind.LARK, 'start: pair+\npair: "a" pair "b" | "c" | "d"'),
)


@functools.cache
def vocabulary() -> Vocabulary:
    """Return the one vocabulary of all simulated nodes, which says nothing of their state."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": END, "content": "<|end|>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    table = {
        "version": "1.0",
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "added_tokens": [end],
        "model": {"type": "BPE", "vocab": {letter: at for at, letter in enumerate(LETTERS)}, "merges": []},
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(json.dumps(table))
        return Vocabulary.load(Path(folder), VOCAB)


def next_token(constraint, state):
    """Return the token that the model takes under a constraint, which has followed those before."""
    masks = np.zeros((1, constraint.vocabulary.num_words), np.int32)
    MaskFiller(1).fill([constraint], masks)
    allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")[:VOCAB])
    return int(allowed[state % len(allowed)])


def begun(grammar, stop: StopParams):
    return vocabulary().constraint(grammar, stop)
