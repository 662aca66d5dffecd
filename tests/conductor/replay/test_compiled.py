"""What `conductor compile` made is used where it fits the sources, and gives the same bytes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from base.errors import ConfigError
from conductor.replay import compiled
from conductor.replay.trace import write_trace
from tests.conductor.replay.builders import small_trace

ROOT = Path(__file__).parents[3]

RUNS = (
    ("--policy", "all", "--requests", "out.csv"),
    ("--policy", "peers", "--speed", "3", "--reject", "early"),
    ("--speed", "3", "--reject", "predict", "--slo-ttft", "5", "--view-delay", "0.5", "--html", "out.html"),
    ("--nodes", "4P2D", "--stages", "2", "--disk", "1e6", "--disk-rate", "1e9", "--flip-roles"),
    ("--decode-caches", "--eviction", "lfu", "--fault", "faults"),
    ("--nodes", "4C",),
)  # fmt: skip


def sources(folder: Path) -> Path:
    for package in compiled.PACKAGES:
        (folder / package).mkdir(parents=True)
        (folder / package / "part.py").write_text("VALUE = 1\n")
    return folder


def test_a_changed_line_is_another_build(tmp_path) -> None:
    root = sources(tmp_path)
    before = compiled.key(root)
    assert compiled.key(root) == before
    (root / "kvstore" / "part.py").write_text("VALUE = 2\n")
    assert compiled.key(root) != before


def test_a_line_that_moves_to_another_file_is_another_build(tmp_path) -> None:
    root = sources(tmp_path)
    before = compiled.key(root)
    (root / "base" / "part.py").rename(root / "base" / "other.py")
    assert compiled.key(root) != before


def test_finder_knows_what_is_in_its_folder_and_nothing_else(tmp_path) -> None:
    file = tmp_path / "conductor" / "replay" / f"links{compiled.SUFFIX}"
    file.parent.mkdir(parents=True)
    file.touch()
    (tmp_path / f"0__mypyc{compiled.SUFFIX}").touch()
    finder = compiled.Compiled(tmp_path)
    spec = finder.find_spec("conductor.replay.links")
    assert spec is not None
    assert spec.origin == str(file)
    assert finder.find_spec("0__mypyc") is not None
    assert finder.find_spec("conductor.replay.cluster") is None


def test_without_a_build_plain_python_runs(tmp_path) -> None:
    before = list(sys.meta_path)
    assert not compiled.use(tmp_path)
    assert sys.meta_path == before


def test_what_is_imported_already_stays_as_it_is(tmp_path) -> None:
    (tmp_path / compiled.key()).mkdir()
    before = list(sys.meta_path)
    assert "conductor.placing.scheduler" in sys.modules  # by the builders
    assert not compiled.use(tmp_path)
    assert sys.meta_path == before


def test_modules_are_there_to_be_compiled() -> None:
    for name in compiled.MODULES:
        assert (ROOT / f"{name.replace('.', '/')}.py").is_file(), name


def test_without_mypyc_the_extra_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="fast"):
        compiled.build(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_compiled_runs_give_the_same_bytes(tmp_path) -> None:
    home = {**os.environ, "HOME": str(tmp_path / "home")}
    run([sys.executable, "-m", "conductor.replay.compiled"], home, ROOT)
    write_trace(small_trace(600), tmp_path / "trace")
    (tmp_path / "faults").write_text('{"at_s": 20, "node": "p1", "for_s": 10}\n{"at_s": 30, "node": "d1"}\n')
    made = [outputs(tmp_path, module, home) for module in ("bench.papers.command", "bench.papers")]
    assert made[0] == made[1]
    told = run([sys.executable, "-c", WHERE], home, ROOT)
    assert told.count(compiled.SUFFIX) == len(compiled.MODULES)


WHERE = """
from importlib import import_module
from conductor.replay import compiled
compiled.use()
print([import_module(name).__file__ for name in compiled.MODULES])
"""


def outputs(folder: Path, module: str, environment: dict[str, str]) -> dict[str, bytes]:
    """Return what each of RUNS writes, by run and file."""
    found = {}
    for number, arguments in enumerate(RUNS):
        out = folder / module / str(number)
        out.mkdir(parents=True)
        shutil.copy(folder / "faults", out)
        command = [
            sys.executable,
            "-m",
            module,
            str(folder / "trace"),
            "--json",
            "--nodes",
            "2P2D",
            *arguments,
        ]
        found[f"{number}"] = run(command, {**environment, "PYTHONPATH": str(ROOT)}, out).encode()
        found |= {f"{number} {file.name}": file.read_bytes() for file in out.iterdir()}
    return found


def run(command: list[str], environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
