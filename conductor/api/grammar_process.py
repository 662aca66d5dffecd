"""`python -m conductor.api.grammar_process FOLDER VOCAB_SIZE`: tries grammars, each in a process of its own.

A client's grammar is a program that a library compiles: it may nest until the stack ends, or ask for years
and terabytes. So it is compiled first where that harms nobody. This process has the model's vocabulary and
does nothing with it; for each grammar it forks, and the child has bounds of memory, of processor time and of
the stack, each a fraction of what nodes have. What a child has compiled and followed for some tokens, they
can.

A line of JSON on standard input is a grammar, and one on standard output the answer: the grammar as nodes are
to have it, or what is wrong with it. The first line out says that it is ready. The end of the input ends it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from base.errors import ConfigError, InvalidRequestError
from base.grammar import MaskFiller, Vocabulary, lark_of
from base.request import Grammar, GrammarKind, StopParams
from conductor.api.schema_narrowing import narrowed

CPU_S = 2
"""Processor time of a child, in whole seconds."""
WALL_S = 10.0
"""Time of a child on a machine that has no time for it."""
MEMORY_BYTES = 1 << 30
"""Address space of a child beyond what this process has."""
STACK_BYTES = 1 << 20
NUM_TRIED_TOKENS = 24
MAX_MASK_S = 0.2
"""Processor time of one mask: while it is computed, a step of a whole batch may wait."""


MAX_PLACE_S = 0.3
"""Processor time of the search for a fault's place."""
MAX_PLACE_CHARS = 200
_OF_SCHEMAS = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])
_OF_VALUES = frozenset(["enum", "const", "default", "examples"])


def tried(vocabulary: Vocabulary, asked: Grammar) -> Grammar:
    """Return a grammar as nodes are to have it; raises InvalidRequestError, which says what is wrong."""
    grammar = _compiled(vocabulary, lark_of(asked) if asked.kind is GrammarKind.LARK else asked)
    constraint = vocabulary.constraint(grammar, StopParams(1))
    filler = MaskFiller(1)
    masks = np.empty((1, vocabulary.num_words), np.int32)
    for at in range(NUM_TRIED_TOKENS):
        began_s = time.process_time()
        filler.fill([constraint], masks)
        if time.process_time() - began_s > MAX_MASK_S:
            raise InvalidRequestError("it takes too long to follow: make its repetitions smaller")
        if constraint.error:
            raise InvalidRequestError(constraint.error)
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
        if not len(allowed):
            if not at:
                break
            return grammar
        # Another part of the vocabulary each time, the same ones whenever it is tried.
        constraint.follow([int(allowed[at * 7919 % len(allowed)])])
    else:
        return grammar
    raise InvalidRequestError("no text is of this form")


def _compiled(vocabulary: Vocabulary, asked: Grammar) -> Grammar:
    """Return a grammar, or a narrower one, that the library takes; raises InvalidRequestError."""
    try:
        vocabulary.compile(asked)
        return asked
    except InvalidRequestError:
        if asked.kind is not GrammarKind.JSON_SCHEMA:
            raise
        narrower = _narrower(vocabulary, asked.source)
        if narrower is None:
            raise
        with suppress(InvalidRequestError):
            vocabulary.compile(narrower)
            return narrower
        raise


def _narrower(vocabulary: Vocabulary, source: str) -> Grammar | None:
    def is_known_format(name: str) -> bool:
        try:
            vocabulary.compile(_schema({"type": "string", "format": name}))
        except InvalidRequestError:
            return False
        return True

    try:
        return _schema(narrowed(json.loads(source), is_known_format))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        # It is no schema, and what the library says of it is what is wrong.
        return None


def place_of(vocabulary: Vocabulary, schema: Any, problem: str) -> str:
    """Return where in a schema the fault is, as properties.a.items: the smallest part that is refused alike.

    Empty: it is of the schema as a whole, or was not found in a while.
    """
    until_s = time.process_time() + MAX_PLACE_S

    def within(part: Any) -> Iterator[str]:
        for name, inner in _parts(part) if isinstance(part, dict) else ():
            if time.process_time() < until_s and _refusal(vocabulary, inner) == problem:
                yield name
                yield from within(inner)
                return

    return ".".join(within(schema))[:MAX_PLACE_CHARS]


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that stand in a schema, and the names of their places."""
    for key, value in schema.items():
        if key in _OF_SCHEMAS and isinstance(value, dict):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        elif isinstance(value, list):
            yield from ((f"{key}[{at}]", inner) for at, inner in enumerate(value))
        elif key not in _OF_VALUES:
            yield key, value


def _refusal(vocabulary: Vocabulary, schema: Any) -> str:
    """Return how a schema is refused by itself; empty: it is none, or it is taken."""
    if isinstance(schema, dict):
        try:
            vocabulary.compile(_schema(schema))
        except InvalidRequestError as error:
            return str(error)
    return ""


def _schema(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False, separators=(",", ":")))


def _answer(vocabulary: Vocabulary, line: bytes) -> dict[str, Any]:
    table = json.loads(line)
    asked = Grammar(GrammarKind(table["kind"]), table["source"])
    try:
        grammar = tried(vocabulary, asked)
    except InvalidRequestError as error:
        return {"error": _where(vocabulary, asked, str(error)) + str(error)}
    except MemoryError:
        return {"error": "it takes too much memory to compile"}
    return {"kind": grammar.kind.value, "source": grammar.source}


def _where(vocabulary: Vocabulary, asked: Grammar, problem: str) -> str:
    if asked.kind is not GrammarKind.JSON_SCHEMA:
        return ""
    with suppress(ValueError, RecursionError, MemoryError):
        if place := place_of(vocabulary, json.loads(asked.source), problem):
            return f"{place}: "
    return ""


def _in_child(vocabulary: Vocabulary, line: bytes, sink: int) -> None:
    """Try a grammar under bounds, and write the answer to `sink`."""
    used = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(_answer(vocabulary, line)))
    thread.start()
    thread.join()
    left = memoryview(json.dumps(answers[0]).encode())
    while left:
        left = left[os.write(sink, left) :]


def _tried_apart(vocabulary: Vocabulary, line: bytes) -> bytes:
    """Return the answer of a child; its end before that is an answer too."""
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(source)
            _in_child(vocabulary, line, sink)
            status = 0
        finally:
            os._exit(status)
    os.close(sink)
    killer = threading.Timer(WALL_S, os.kill, (child, signal.SIGKILL))
    killer.start()
    parts = []
    while part := os.read(source, 1 << 16):
        parts.append(part)
    os.close(source)
    _, status = os.waitpid(child, 0)
    killer.cancel()
    killer.join()
    if status == 0:
        return b"".join(parts)
    return json.dumps({"error": _why_ended(status)}).encode()


def _why_ended(status: int) -> str:
    ended_by = -os.waitstatus_to_exitcode(status)
    if ended_by in (signal.SIGXCPU, signal.SIGKILL):
        return f"it takes more than {CPU_S} s to compile"
    if ended_by == signal.SIGSEGV:
        return "it is nested too deeply"
    return "it takes too much memory to compile" if ended_by == signal.SIGABRT else "it cannot be compiled"


def main() -> int:
    folder, vocab_size = Path(sys.argv[1]), int(sys.argv[2])
    try:
        vocabulary = Vocabulary.load(folder, vocab_size)
    except ConfigError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return 1
    sink = sys.stdout.buffer
    sink.write(b"{}\n")
    sink.flush()
    for line in sys.stdin.buffer:
        sink.write(_tried_apart(vocabulary, line) + b"\n")
        sink.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
