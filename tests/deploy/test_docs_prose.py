"""What strangers read: lines and sentences of a length that can be read, links that lead somewhere.

Figures with a date, a commit or a load average stand in bench/results and CHANGELOG.md, and nowhere else.
"""

import re

import pytest

from tests.deploy.processes import ROOT

GENERATED = {"docs/reference/api.md", "docs/reference/configuration.md", "docs/reference/metrics.md"}
GENERATED |= {"docs/reference/cli.md"}
DOCUMENTS = {
    file.relative_to(ROOT).as_posix(): file.read_text()
    for file in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
}
WRITTEN = {name: text for name, text in DOCUMENTS.items() if name not in GENERATED | {"CHANGELOG.md"}}
RESULTS = {
    file.relative_to(ROOT).as_posix(): file.read_text()
    for file in sorted((ROOT / "bench" / "results").glob("*.md"))
}
MAX_COLUMNS = 120
MAX_WORDS = 40
MAX_LINES = {"README.md": 120, "RELIABILITY.md": 120, "SECURITY.md": 120, "DESIGN.md": 200}

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
MEASURED = {
    "a date": re.compile(r"\b20\d\d-\d\d-\d\d\b"),
    "a commit": re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7}\b"),
    "a load average": re.compile(r"load averages? (of|above|below|\d)"),
}


def without_code(text):
    """Return the text without fenced blocks; a block's place is an empty line."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def sentences(text):
    """Yield the sentences of a document: of paragraphs, of each item of a list, of each cell of a table."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )|\n(?=[|#])", without_code(text)):
        if block.startswith("    "):
            continue
        for part in block.split("|") if block.startswith("|") else [block]:
            prose = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(part.split()))
            prose = re.sub(r"`[^`]*`", "code", prose)
            yield from re.split(r"(?<=[.!?:])\s+(?=[A-Z*`\"(0-9])|;\s+", prose)


@pytest.mark.parametrize("name", WRITTEN)
def test_no_line_is_too_wide(name):
    wide = [
        line for line in WRITTEN[name].splitlines() if len(line) > MAX_COLUMNS and not line.startswith("|")
    ]
    assert not wide, f"{name}: over {MAX_COLUMNS} columns: {wide}"


@pytest.mark.parametrize("name", WRITTEN)
def test_no_sentence_is_too_long(name):
    long = [sentence for sentence in sentences(WRITTEN[name]) if len(sentence.split()) > MAX_WORDS]
    assert not long, f"{name}: over {MAX_WORDS} words: {long}"


def test_a_long_sentence_is_found_in_paragraphs_lists_and_tables():
    long = " ".join(["word"] * (MAX_WORDS + 1))
    for text in (long, f"Short.\n* {long}", f"| a |\n|---|\n| {long} |"):
        assert max(len(sentence.split()) for sentence in sentences(text)) > MAX_WORDS
    assert max(len(sentence.split()) for sentence in sentences(f"```\n{long}\n```\nShort.")) <= MAX_WORDS


@pytest.mark.parametrize("name", MAX_LINES)
def test_a_page_stays_a_page(name):
    assert len(DOCUMENTS[name].splitlines()) <= MAX_LINES[name]


@pytest.mark.parametrize("kind", MEASURED)
@pytest.mark.parametrize("name", WRITTEN)
def test_what_was_measured_when_stands_in_the_results(name, kind):
    found = MEASURED[kind].findall(WRITTEN[name])
    assert not found, f"{name} has {kind}: {found}"


def anchors(text):
    """Return the anchors of a document's headings, as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def links(text):
    for found in LINK.findall(re.sub(r"`[^`\n]*`", "", without_code(text))):
        target = found[0] or found[1]
        if not target.startswith(("http:", "https:", "mailto:")):
            yield target


@pytest.mark.parametrize("name", [*DOCUMENTS, *RESULTS])
def test_every_link_leads_somewhere(name):
    text = (DOCUMENTS | RESULTS)[name]
    for target in links(text):
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), f"{name}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text()), f"{name}: {target}"


ANSWERS = {
    "docs/how-to/gpu-host.md": "prefill: {nodes: 3, gpus_per_node: 1}",
    "docs/explanation/failures.md": "## What happens to my stream when a decode node dies?",
    "docs/how-to/rejected.md": "# Why was my request rejected?",
    "docs/how-to/add-transport.md": "base/transports.py",
    "docs/explanation/costs.md": "## What does it cost me on short prompts?",
}
"""Pages that answer what a stranger asks first, and what of the answer has to stand there."""


@pytest.mark.parametrize("page", ANSWERS)
def test_what_a_stranger_asks_is_one_link_away_from_the_readme(page):
    assert f"({page})" in WRITTEN["README.md"]
    assert ANSWERS[page] in WRITTEN[page]


EXPLANATIONS = [name for name in WRITTEN if name.startswith("docs/explanation/")]


@pytest.mark.parametrize("name", EXPLANATIONS)
def test_an_explanation_begins_with_a_picture(name):
    beginning = WRITTEN[name].split("\n## ")[0].splitlines()[:12]
    assert any(line.startswith(("```mermaid", "![")) for line in beginning), f"{name} shows nothing at first"


FOLDERS = ("base", "bench", "conductor", "decode_node", "deploy", "docs", "engine", "kvstore", "node")
FILE = re.compile(rf"`((?:{'|'.join((*FOLDERS, 'prefill_node', 'protos', 'tests', 'transfer'))})/[\w./-]+)")


@pytest.mark.parametrize("name", WRITTEN)
def test_every_file_that_is_named_is_there(name):
    missing = {path for path in FILE.findall(WRITTEN[name]) if not (ROOT / path.rstrip("/.")).exists()}
    assert not {path for path in missing if "NAME" not in path}, f"{name} names {missing}"
