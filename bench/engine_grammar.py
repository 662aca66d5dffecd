"""`python -m bench.engine_grammar`: what grammars cost a decode step on one GPU.

The 8B shape with random weights, 64 sequences of 1,024 tokens and more. By turns nobody has a grammar, half
of them have, and all have: objects of four schemas, which go on for as long as is measured. The vocabulary
is made up (128,256 byte-level tokens: syllables, numbers, marks, white space), because masks cost what the
tokens that share a beginning cost. Nothing is downloaded.

    python -m bench.engine_grammar --out bench/results/engine_grammar.json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from base.grammar import Vocabulary
from base.request import Grammar, GrammarKind, SamplingParams
from bench.about_run import current_commit, today, write_result
from bench.engine import ENGINE, build_bench_engine
from bench.engine_shapes import SHAPES
from bench.engine_work import GREEDY, Driver, Prompts
from engine.build import Engine
from engine.sequence import Sequence

BATCH, CONTEXT, STEPS = 64, 1024, 128
SHARES = {"none": 0, "half": 2, "all": 1}
"""Every which sequence has a grammar; 0: none."""
MUST = {"half": 1.03, "all": 1.05}
SAMPLINGS = {"greedy": GREEDY, "drawn": SamplingParams(temperature=0.8, seed=1)}

_WORD = {"type": "string", "maxLength": 16}
_OBJECTS: tuple[dict[str, object], ...] = (
    {"name": _WORD, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
    {"city": {"enum": ["Berlin", "Paris", "London", "Rome", "Madrid"]}, "unit": {"enum": ["C", "F"]}},
    {
        "id": {"type": "string", "pattern": "^[a-f0-9]{8}-[a-f0-9]{4}$"},
        "tags": {"type": "array", "items": _WORD},
    },
    {"x": {"type": "number"}, "is_new": {"type": "boolean"}, "at": {"type": "string", "format": "date-time"}},
)


def schemas() -> list[Grammar]:
    """Return grammars of lists that may not end before a million objects."""
    found = []
    for properties in _OBJECTS:
        item = {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
        schema = {"type": "array", "items": item, "minItems": 1_000_000}
        found.append(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    return found


def _words() -> Iterator[str]:
    """Yield tokens as byte-level tokenizers spell them; the first of each is a space for half of them."""
    space, line = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}", "\N{LATIN CAPITAL LETTER C WITH DOT ABOVE}"
    for count in range(2, 64):
        yield space * count
        yield line + space * count
    for digits in (2, 3):
        yield from map("".join, itertools.product("0123456789", repeat=digits))
    yield from map("".join, itertools.product('{}[]":,.-_/', repeat=2))
    yield from map("".join, itertools.product('{}[]":,.', repeat=3))
    syllables = ["".join(pair) for pair in itertools.product("bcdfghklmnprstvw", "aeiou")]
    for length in (1, 2, 3):
        for word in map("".join, itertools.product(syllables, repeat=length)):
            yield word
            yield space + word


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer of `vocab_size` tokens to `folder`; the last one is special."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(byte) for byte in printable] + [chr(256 + at) for at in range(256 - len(printable))]
    words = dict.fromkeys([*alphabet, *_words()])
    vocab = {word: at for at, word in enumerate(itertools.islice(words, vocab_size - 1))}
    assert len(vocab) == vocab_size - 1, "the syllables make enough words"
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {
        "id": vocab_size - 1,
        "content": "<|end|>",
        "special": True,
        **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
    }
    table = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "added_tokens": [end],
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(table))


def constraining(vocabulary: Vocabulary, every: int) -> Callable[[int, Sequence], None]:
    """Return what gives every which sequence a constraint, one grammar after the other."""
    grammars = schemas()

    def constrain(at: int, sequence: Sequence) -> None:
        if every and at % every == 0:
            sequence.constraint = vocabulary.constraint(grammars[at // every % len(grammars)], sequence.stop)

    return constrain


async def measured(engine: Engine, vocabulary: Vocabulary, repeats: int) -> dict[str, dict[str, Any]]:
    """Return what a step takes by sampling and share; print each when it is known."""
    # One driver: the engine's loop belongs to one event loop.
    driver = Driver(engine, Prompts(engine.vocab_size, 0))
    rows: dict[str, dict[str, Any]] = {}
    try:
        for sampling, params in SAMPLINGS.items():
            times = await step_ms(driver, vocabulary, params, repeats)
            none_ms = statistics.median(times["none"])
            for name, values in times.items():
                must, ratio = MUST.get(name), statistics.median(values) / none_ms
                rows[f"{sampling}, {name}"] = {"step_ms": values, "ratio": ratio, "must": must}
                verdict = "  SHORT" if must is not None and ratio > must else ""
                value = statistics.median(values)
                print(f"{sampling:7} {name:5} {value:8.3f} ms {ratio:7.4f}{verdict}", flush=True)
    finally:
        await driver.close()
    return rows


async def step_ms(
    driver: Driver, vocabulary: Vocabulary, sampling: SamplingParams, repeats: int
) -> dict[str, list[float]]:
    """Return the milliseconds of a decode step for each share of sequences under grammars, by turns."""
    times: dict[str, list[float]] = {name: [] for name in SHARES}
    for _ in range(repeats + 1):
        for name, every in SHARES.items():
            constrain = constraining(vocabulary, every)
            seconds = await driver.decode_step_s(BATCH, CONTEXT, STEPS, sampling, constrain)
            times[name].append(1e3 * seconds)
    return {name: values[1:] for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kv-gib", type=float, default=40.0)
    parser.add_argument("--commit", default="", help="where the checkout has no .git")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = replace(ENGINE, chunk_tokens=2048, max_batch=BATCH, kv_cache_gib=options.kv_gib)
    engine = build_bench_engine(options.model, config)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), engine.vocab_size)
        vocabulary = Vocabulary.load(Path(folder), engine.vocab_size)
    rows = asyncio.run(measured(engine, vocabulary, options.repeats))
    report = {
        "model": options.model,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "llguidance": version("llguidance"),
        "commit": options.commit or current_commit(),
        "date": today(),
        "batch": BATCH,
        "context": CONTEXT,
        "steps": STEPS,
        "rows": rows,
    }
    write_result(options.out, report)


if __name__ == "__main__":
    main()
