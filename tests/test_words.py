"""The words of the product: one class for a name, and docstrings that strangers read line by line.

A docstring begins with what it is about: one that begins with a preposition or a pronoun ("Of it, from then
on.") is understood only with the line above it. A first sentence is short enough to be read once, and nothing
says what the code was before.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "base",
    "conductor",
    "decode_node",
    "deploy",
    "engine",
    "kvstore",
    "node",
    "prefill_node",
    "transfer",
)
READ_TOO = ("bench/faults",)
"""Folders whose docstrings are held to the same rules, and whose classes are no part of the product."""

TEXTS = (".py", ".js", ".html", ".proto", ".yaml", ".md")
PAGES = ("README.md", "DESIGN.md", "CONTRIBUTING.md", "SECURITY.md", "RELIABILITY.md", "docs", "protos")
TELLING = re.compile(r"(?<![a-z])(told|tells?|telling)(?![a-z])", re.IGNORECASE)
"""Words for what has one of its own: return, notify, log, send, report; `distinguish` for to tell apart."""
SAID_TO_A_MODEL = "tell me what it does"
"""Part of a prompt that results in `bench/results` were measured with; it stays as it was."""
MAX_FIRST_SENTENCE_WORDS = 25
BANNED_WORDS = re.compile(r"\b(told|tells|passages?|used to|no longer|formerly)\b", re.IGNORECASE)
PREPOSITIONS = """
    about above across after against along among around as at before behind below beneath beside
    besides between beyond by despite down during except for from in inside into like near of off on
    onto out outside over past per since than through throughout till to toward towards under until
    up upon via with within without
"""
PRONOUNS = """
    i me my mine we us our ours you your yours he him his she her hers it its they them their theirs
    this that these those who whom whose what which whatever whichever whoever itself themselves
"""
BANNED_OPENERS = frozenset((PREPOSITIONS + PRONOUNS).split())
NEEDS_THE_LINE_ABOVE = re.compile(
    r"(The same|Also|Then|Likewise|More of|Empty where|(?:Empty|None|True|False|Infinity|0)(?=[:,]))\b"
)
"""Openers that say what a value means, or does too, and not what it is."""


class Docstring(NamedTuple):
    owner: str
    line: int
    text: str


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def clean_files(packages: tuple[str, ...] = PACKAGES) -> tuple[tuple[str, ast.Module], ...]:
    """Return the names and the trees of the files that the rules hold for."""
    return tuple(
        (file.relative_to(ROOT).as_posix(), tree_of(file))
        for package in packages
        for file in sorted((ROOT / package).rglob("*.py"))
        if "_pb2" not in file.name
    )


def docstrings(tree: ast.Module) -> Iterator[Docstring]:
    """Yield what documents modules, classes, functions, and the attributes that stand in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield Docstring(getattr(node, "name", "the module"), node.body[0].lineno, text)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for value, below in zip(node.body, node.body[1:], strict=False):
                if isinstance(value, ast.Assign | ast.AnnAssign) and _is_text(below):
                    target = value.targets[0] if isinstance(value, ast.Assign) else value.target
                    yield Docstring(ast.unparse(target), below.lineno, ast.literal_eval(below.value))


def _is_text(node: ast.stmt) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def first_sentence(text: str) -> str:
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`\"'(0-9])", paragraph)[0]


def faults_of(text: str) -> list[str]:
    """Return what is wrong with a docstring's words."""
    sentence = first_sentence(text)
    opener = re.match(r"[A-Za-z']+", sentence)
    num_words = len(re.findall(r"[\w'`.\-/]+", sentence))
    banned = BANNED_WORDS.search(text)
    found = []
    if opener and opener.group().lower() in BANNED_OPENERS:
        found.append(f"begins with {opener.group()!r}")
    if dependent := NEEDS_THE_LINE_ABOVE.match(text):
        found.append(f"begins with {dependent.group()!r}")
    if num_words > MAX_FIRST_SENTENCE_WORDS:
        found.append(f"its first sentence has {num_words} words")
    if banned:
        found.append(f"says {banned.group()!r}")
    return found


def names_given_twice(files: tuple[tuple[str, ast.Module], ...]) -> list[str]:
    """Return the names that several classes have, each with where they are."""
    places: dict[str, list[str]] = {}
    for name, tree in files:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{name}:{node.lineno}")
    return [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1]


def test_a_class_name_stands_for_one_class() -> None:
    twice = names_given_twice(clean_files())
    assert not twice, "two classes have one name:\n" + "\n".join(twice)


def lines_with(pattern: re.Pattern[str], roots: tuple[str, ...]) -> list[str]:
    """Return the lines that a pattern is found in, each with its place; what a program wrote is left out."""
    files = [
        file
        for root in map(ROOT.joinpath, roots)
        for file in ([root] if root.is_file() else sorted(root.rglob("*")))
        if file.suffix in TEXTS and "_pb2" not in file.name and "results" not in file.parts
    ]
    return [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


def test_nothing_tells_what_it_returns_notifies_logs_or_sends() -> None:
    found = lines_with(TELLING, (*PACKAGES, *PAGES, "bench", "tests/bench", "tests/faults", "tests/fuzz"))
    found = [line for line in found if SAID_TO_A_MODEL not in line]
    assert not found, "\n".join(found)


def test_no_queue_or_capacity_is_called_a_room() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, tree in clean_files()
        for node in ast.walk(tree)
        if "room" in (getattr(node, "id", ""), getattr(node, "arg", ""), getattr(node, "attr", ""))
        or (isinstance(node, ast.FunctionDef) and node.name.strip("_") == "room")
    ]
    assert not found, "\n".join(found)


def test_docstrings_are_read_without_the_line_above() -> None:
    faulty = [
        f"{name}:{line}: {owner}: {fault}: {first_sentence(text)[:80]}"
        for name, tree in clean_files(PACKAGES + READ_TOO)
        for owner, line, text in docstrings(tree)
        for fault in faults_of(text)
    ]
    assert not faulty, "\n".join(faulty)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Of it, from then on.", "begins with 'Of'"),
        ("Its own share.\n\nThe rest is the pool's.", "begins with 'Its'"),
        ("One " * 26 + "end. Short.", "its first sentence has 27 words"),
        ("The same for nodes.", "begins with 'The same'"),
        ("Empty: none is kept.", "begins with 'Empty'"),
        ("The number that a node told.", "says 'told'"),
        ("The lease. It used to be longer.", "says 'used to'"),
    ],
)
def test_a_faulty_docstring_is_found(text: str, fault: str) -> None:
    assert faults_of(text) == [fault]


def test_a_plain_docstring_has_no_fault() -> None:
    assert not faults_of("Seconds until a lease ends.\n\nOf several, the one that ends first.")


def test_docstrings_of_values_and_twins_of_classes_are_found() -> None:
    tree = ast.parse('A = 1\n"""The one."""\nclass B:\n    """A value."""\n    c: int = 2\n    """Two."""\n')
    assert [(found.owner, found.line) for found in docstrings(tree)] == [("A", 2), ("B", 4), ("c", 6)]
    assert names_given_twice((("x.py", tree), ("y.py", tree))) == ["B: x.py:3, y.py:3"]


def test_the_glossary_names_files_that_are_there_and_no_word_twice() -> None:
    rows = re.findall(
        r"^\| ([a-zA-Z][^|]*) \|.*\| ([^|]*) \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE
    )
    rows = [(word, owners) for word, owners in rows if word != "word"]
    files = [file for _, owners in rows for file in re.findall(r"`([^`]+)`", owners)]
    words = [word for word, _ in rows]
    assert len(rows) > 50
    assert all(re.search(r"`[^`]+`", owners) for _, owners in rows), "a word has no file"
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert len(words) == len(set(words))
