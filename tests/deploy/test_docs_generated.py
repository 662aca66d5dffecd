"""The pages of docs/reference are what the sources make."""

import importlib.util
import subprocess
import sys

import pytest

from tests.deploy.generators import loaded
from tests.deploy.processes import ROOT

reference = loaded("generate_api")
GENERATE = loaded("generate")
PAGES = ROOT / "docs" / "reference"
STALE = "stale: python docs/generate.py"


@pytest.mark.parametrize("file", reference.files(), ids=lambda file: file.name)
def test_the_reference_of_the_api_is_current(file):
    assert file.read_text() == reference.files()[file], "stale: python docs/generate_api.py"


@pytest.mark.parametrize("name", ["configuration", "metrics"])
def test_a_page_is_what_the_sources_make(name):
    assert (PAGES / f"{name}.md").read_text() == getattr(GENERATE, name)(), STALE


@pytest.mark.full
def test_the_page_of_commands_is_what_their_help_says():
    assert (PAGES / "cli.md").read_text() == GENERATE.commands(), STALE


def test_every_key_and_its_reason_are_on_the_page_of_the_configuration():
    page = GENERATE.configuration()
    assert "| `server.http_port` | `8000` | OpenAI's API, metrics and health. 0: a free port" in page
    row = "| `decode.engine.max_batch` | `0` | Sequences in one step at most. 0: 256 on a GPU, 64 on a CPU. |"
    assert row in page


def test_labels_of_a_metric_are_on_its_page():
    assert "| `conductor_sequences_total` | counter | `outcome` |" in GENERATE.metrics()


PAGES_OF_THE_SITE = sorted(
    file.relative_to(ROOT / "docs").as_posix() for file in (ROOT / "docs").rglob("*.md")
)


@pytest.mark.parametrize("page", PAGES_OF_THE_SITE)
def test_the_navigation_leads_to_every_page(page):
    assert f": {page}\n" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="make docs installs MkDocs")
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "repository" / "bench" / "results" / "faults" / "index.html").exists()
