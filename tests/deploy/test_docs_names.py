"""Keys, metrics and options that the documents name are those that the code has."""

import re

import pytest

from base.errors import (
    DeadlineError,
    ForbiddenError,
    InvalidRequestError,
    LostError,
    UnauthenticatedError,
    UnavailableError,
    UnknownModelError,
)
from conductor.api.http_errors import http_error
from conductor.api.routes import ROUTES
from deploy.top import LINES
from tests.deploy.processes import ROOT

REFERENCE = ROOT / "docs" / "reference"
KEYS = set(re.findall(r"^\| `([\w.]+)`", (REFERENCE / "configuration.md").read_text(), re.MULTILINE))
METRICS = set(re.findall(r"^\| `(\w+)`", (REFERENCE / "metrics.md").read_text(), re.MULTILINE))
OPTIONS = set(re.findall(r"--[a-z][\w-]+", (REFERENCE / "cli.md").read_text()))
SECTIONS = {key.split(".")[0] for key in KEYS} | {"engine"}
ANOTHER_PROGRAM = re.compile(r"^(python -m|ray|git|pip|promtool|make|mypy|ruff) ")
NO_KEY = re.compile(r"\.(py|pem|key|json|yaml|md|proto)$")
OF_VLLM = {"docs/how-to/from-vllm.md"}
OF_A_STORE = {"conductor_addresses"}
"""Keys of a storage process's own file."""

PAGES = {
    path.relative_to(ROOT).as_posix(): re.sub(
        r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
    if path.name not in ("CHANGELOG.md", "cli.md", "configuration.md", "metrics.md")
}


def quoted(page):
    return re.findall(r"`([^`\n]+)`", PAGES[page])


def is_key(name):
    """Whether a dotted name is a key or a section; `engine.X` is short for that of either pool."""
    full = [name, f"prefill.{name}"]
    return any(key == each or key.startswith(f"{each}.") for key in KEYS for each in full)


def source_of(module):
    """Return the text of a module, or of all files of a package."""
    place = ROOT / module.replace(".", "/")
    return "".join(
        file.read_text() for file in [place.with_suffix(".py"), *place.glob("*.py")] if file.exists()
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_key_that_is_named_is_one(page):
    named = [re.match(r"([a-z_]+(?:\.[a-z_]+)+)(?::.*)?$", each) for each in quoted(page)]
    keys = {found[1] for found in named if found and not NO_KEY.search(found[1])}
    assert not {key for key in keys if key.split(".")[0] in SECTIONS and not is_key(key)}


@pytest.mark.parametrize("page", PAGES)
def test_every_metric_that_is_named_is_one(page):
    pattern = r"((?:conductor|prefill|decode|transfer|kvstore)_[a-z_]+_[a-z_]+|conductor_[a-z_]+)(?:\{.*\})?$"
    named = {found[1] for each in quoted(page) if (found := re.match(pattern, each))}
    assert not named - METRICS - OF_A_STORE - {"prefill_node", "decode_node"}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OF_VLLM])
def test_every_option_that_is_named_is_one(page):
    named = {
        option
        for each in quoted(page)
        if not ANOTHER_PROGRAM.match(each)
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]+", each)
    }
    modules = re.findall(r"python -m (bench\.\w+|tests\.\w+)", PAGES[page])
    text = "".join(map(source_of, modules))
    assert not {option for option in named - OPTIONS if option not in text}


@pytest.mark.parametrize("route", sorted({route.path for route in ROUTES if route.what}))
def test_every_path_is_in_the_guide_of_the_apis(route):
    begin = re.escape(re.sub(r"\{.*", "", route))
    assert re.search(rf"`(?:GET |POST )?{begin}[{{`]", PAGES["docs/reference/client-api.md"]), route


@pytest.mark.parametrize("page", ["docs/how-to/rejected.md", "docs/reference/client-api.md"])
def test_an_errors_code_is_that_of_its_status(page):
    made = (InvalidRequestError(""), UnknownModelError("x"), UnauthenticatedError(""), ForbiddenError(""))
    answers = [http_error(error) for error in (*made, UnavailableError(""), LostError(""), DeadlineError(""))]
    codes = {(answer.status, answer.code or "") for answer in answers}
    rows = re.findall(r"(?:\||,) (40[0134]|50[34]) \| (?:`(\w+)` )?\| (?=[A-Z_]+)", PAGES[page])
    shown = {(int(status), code) for status, code in rows if code != "context_length_exceeded"}
    assert len(shown) > 5
    assert shown <= codes


def test_the_rows_of_top_in_the_readme_are_those_that_it_shows():
    [shown] = re.findall(
        r"^last 10 minutes .*\n((?:.*\n)*?)node ", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    names = {re.split(r"  +", line)[0] for line in shown.splitlines()}
    assert names
    assert names <= {name for name, _, _ in LINES}
