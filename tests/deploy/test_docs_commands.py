"""Every command of the documents that is no `conductor ...` is one that this checkout has.

Those of curl run in test_docs_run.py, of openssl in tests/conductor/test_recipe.py, of a trace here. Another
program's command fails until a test knows it.
"""

import ast
import gzip
import importlib
import importlib.util
import re
import shlex
import textwrap
from pathlib import Path

import pytest

from deploy.cli import main
from tests.deploy.processes import ROOT
from tests.deploy.test_docs import COMMANDS, LINE

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS_A_DEVICE = {"docs/how-to/rdma.md"}
"""Pages whose packages no test installs."""

TYPED = ("make", "curl", "python", "pip", "kubectl", "openssl", "apt-get", "ln")


def typed_lines(path):
    """Yield the commands of a page's indented blocks, lines that go on in the next one joined."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for line in re.findall(r"^ {4}(\S.*)$", text.replace("\\\n", " "), re.MULTILINE):
        if line.split()[0] in TYPED and not LINE.match(f"    {line}"):
            yield (
                re.sub(r"\s{2,}.*$|\s+#.*$", "", line) if line.split()[0] not in ("curl", "openssl") else line
            )


LINES = [(path.relative_to(ROOT).as_posix(), line) for path in PAGES for line in typed_lines(path)]


@pytest.mark.parametrize(("page", "line"), LINES)
def test_the_command_is_there(page, line):
    program, *arguments = line.split()
    assert shlex.split(line, comments=True), "what is in quotes ends in the same line"
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
    elif program == "python":
        assert_module_takes(arguments[1], arguments[2:])
    elif program == "pip":
        [extra] = re.findall(r"\[(\w+)\]", line)
        assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE), line
    elif program == "kubectl":
        assert (ROOT / arguments[-1]).exists(), line
    elif program in ("apt-get", "ln"):
        assert page in NEEDS_A_DEVICE, line
    elif program == "openssl":
        assert page == "docs/how-to/tls-and-keys.md", "tests/conductor/test_recipe.py runs that page's alone"


def assert_module_takes(module, arguments):
    """Assert that `python -m module` is there and knows the options, and that pytest's files are there."""
    if module == "pytest":
        assert all((ROOT / file).exists() for file in arguments if file.endswith(".py")), arguments
        return
    found = importlib.util.find_spec(module)
    assert found, module
    folder = Path(found.origin).parent if found.origin else Path(next(iter(found.submodule_search_locations)))
    text = "".join(source.read_text() for source in [*folder.glob("*.py"), *(ROOT / "base").glob("*.py")])
    for option in (each for each in arguments if each.startswith("--")):
        assert re.search(rf"[\"'\[ ]{option}[\"'\] ]", text), f"python -m {module} has no {option}"


def test_every_program_that_the_documents_call_is_known():
    assert {line.split()[0] for _, line in LINES} == set(TYPED)


BLOCKS = [
    (path.relative_to(ROOT).as_posix(), block)
    for path in PAGES
    for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=lambda value: value[:30])
def test_python_of_the_documents_can_be_read_and_imports_what_is_there(page, block):
    for node in ast.walk(ast.parse(textwrap.dedent(block))):
        if isinstance(node, ast.ImportFrom):
            module = pytest.importorskip(node.module.split(".")[0]) and importlib.import_module(node.module)
            assert all(hasattr(module, name.name) for name in node.names), f"{page}: {ast.unparse(node)}"


SAMPLE = "bench/traces/sample.jsonl"
FENCE = re.MULTILINE | re.DOTALL
OF_A_TRACE = sorted(
    {
        line
        for _, line in COMMANDS
        if line.split()[0] in ("replay", "advise") and not re.search("decisions|other-day|NAME", line)
    }
)


@pytest.mark.parametrize("line", OF_A_TRACE)
def test_a_command_of_a_trace_runs_on_our_small_one(line, tmp_path, monkeypatch, capsys):
    sample = (ROOT / SAMPLE).read_text()
    (tmp_path / "bench" / "traces").mkdir(parents=True)
    for name in ("trace.jsonl", "conversation_trace.jsonl", SAMPLE):
        (tmp_path / name).write_text(sample)
    (tmp_path / "trace.jsonl.gz").write_bytes(gzip.compress(sample.encode()))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    shown = capsys.readouterr()
    assert not ended.value.code, shown.err
    if SAMPLE in line:
        page = ROOT / "docs/tutorial/first-trace.md"
        table, advice = re.findall(r"^```text\n(.*?)^```", page.read_text(), FENCE)
        if line.startswith("advise"):
            assert shown.out.endswith(advice)
        else:
            assert_shows(page, table, shown.out)


def assert_shows(page, table, output):
    """Assert that each row of the page's table has the figures, not always all, of the row that came out."""
    came = {line.split()[0]: line.split() for line in output.splitlines() if line.strip()}
    for row in [line.split() for line in table.splitlines()[1:]]:
        assert set(row) <= set(came[row[0]]), f"{page.name} shows {row}, and it is {came[row[0]]} now"
