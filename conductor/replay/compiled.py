"""`conductor compile`: the modules that replay spends its time in, as C. Optional.

mypyc makes C of the typed Python that also serves live: the same source, the same results to
the byte, twice as many requests a second. What was built lies in the user's cache, in a folder
named after all source that it was made from and after the interpreter: a changed line finds no
folder, and plain Python runs. So nothing compiled can be older than what is read here, which is
why it does not lie beside the sources.

`use` is for the first line of a process: modules that are imported already stay what they are.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from base.config import ClusterConfig
from base.errors import ConfigError

MODULES = (
    "conductor.placing.admission",
    "conductor.placing.cluster_view",
    "conductor.placing.cost_model",
    "conductor.placing.decode_projection",
    "conductor.placing.load_order",
    "conductor.replay.block_cache",
    "conductor.replay.cluster",
    "conductor.replay.events",
    "conductor.replay.links",
    "conductor.replay.outcome",
    "conductor.replay.policies",
    "conductor.replay.sim_engine",
    "conductor.replay.sim_node",
    "conductor.replay.sim_request",
    "conductor.placing.scheduler",
    "kvstore.index",
)
"""What most of a run's time is spent in. Values that are read from files are left alone: reading
looks at their annotations, and mypyc keeps but a part of those."""

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("base", "conductor", "kvstore")
"""What `MODULES` take their types from."""

HINT = "conductor replay: in plain Python; `conductor compile`, once, makes it twice as fast\n"

SUFFIX: str = sysconfig.get_config_var("EXT_SUFFIX")
"""Of the file of a module in C, for this interpreter."""

# Of one interpreter: for checkouts that take turns.
MOST_BUILDS = 4

# A minute on one core; a machine that needs ten times as long will hardly be used for replay.
TIMEOUT_S = 900.0


class Compiled:
    """Finds the modules of one build, before Python looks for their sources."""

    def __init__(self, folder: Path) -> None:
        self.files = {
            ".".join(file.relative_to(folder).parts).removesuffix(SUFFIX): file
            for file in folder.rglob(f"*{SUFFIX}")
        }

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a compiled module is; None for any other."""
        file = self.files.get(name)
        return spec_from_file_location(name, file) if file else None


def default_folder() -> Path:
    """Return where builds are kept."""
    return Path(ClusterConfig().cache_dir).expanduser() / "compiled"


def key(root: Path = ROOT) -> str:
    """Return the name of the build that fits the sources as they are, and this interpreter."""
    digest = hashlib.sha256(f"{sys.version} {SUFFIX}".encode())
    for file in _sources(root):
        digest.update(f"{file.relative_to(root)} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def use(folder: Path | None = None) -> bool:
    """Import what is compiled from here on; False: there is no build of these sources, or it is too late."""
    build = (folder or default_folder()) / key()
    if not build.is_dir() or any(name in sys.modules for name in MODULES):
        return False
    sys.meta_path.insert(0, Compiled(build))
    return True


def use_or_say_so() -> None:
    """Import what is compiled from here on; where nothing is, say on a terminal that it could be."""
    if not use() and sys.stderr.isatty():
        sys.stderr.write(HINT)


def build(folder: Path | None = None) -> Path:
    """Compile `MODULES` if that has not been done; return the folder of the build.

    Raises:
        ConfigError: mypyc or a C compiler is missing, or failed; the message says how.
    """
    folder = folder or default_folder()
    built = folder / key()
    if built.is_dir():
        return built
    _require_mypyc()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as name:
        draft, made = Path(name) / "source", Path(name) / "made"
        for source in _sources(ROOT):
            _copy(source, draft / source.relative_to(ROOT))
        _run_mypyc(draft)
        for file in draft.glob(f"**/*{SUFFIX}"):
            if "build" not in file.relative_to(draft).parts:
                _copy(file, made / file.relative_to(draft))
        try:
            made.rename(built)
        except OSError:
            if not built.is_dir():  # another process was sooner
                raise
    _keep_newest(folder)
    return built


def main(argv: Sequence[str] | None = None) -> int:
    """Run `conductor compile`; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="conductor compile",
        description="Compile what replay spends its time in. Needs a C compiler, and the extra `fast`.",
    )
    parser.add_argument(
        "-m",
        nargs=argparse.REMAINDER,
        metavar="MODULE",
        help="run a module with what is compiled, like python -m",
    )
    args = parser.parse_args(argv)
    try:
        built = build()
    except ConfigError as error:
        sys.stderr.write(f"conductor compile: {error}\n")
        return 2
    if not args.m:
        sys.stdout.write(f"{built}\n")
    elif use():
        sys.argv = args.m
        runpy.run_module(args.m[0], run_name="__main__", alter_sys=True)
    return 0


def _sources(root: Path) -> list[Path]:
    return sorted(file for package in PACKAGES for file in (root / package).rglob("*.py"))


def _copy(file: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, to)


def _require_mypyc() -> None:
    if find_spec("mypyc") is None or find_spec("setuptools") is None:
        raise ConfigError("mypyc or setuptools is not installed: pip install 'conductor-cluster[fast]'")


def _run_mypyc(source: Path) -> None:
    files = [name.replace(".", "/") + ".py" for name in MODULES]
    types = ["--strict", "--ignore-missing-imports", "--follow-imports=silent", "--no-warn-unused-ignores"]
    # One rounding for each operation, as Python has it: where a processor multiplies and adds in one,
    # compilers do so unless told otherwise.
    flags = f"{os.environ.get('CFLAGS', '')} -ffp-contract=off"
    done = subprocess.run(
        [sys.executable, "-m", "mypyc", *types, *files],
        cwd=source,
        env={**os.environ, "CFLAGS": flags, "MYPYC_DEBUG_LEVEL": "0"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        told = (done.stdout + done.stderr).strip().splitlines()
        raise ConfigError("mypyc failed: " + "\n".join(told[-5:]))


def _keep_newest(folder: Path) -> None:
    builds = sorted(folder.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)
    for old in builds[MOST_BUILDS:]:
        shutil.rmtree(old, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
