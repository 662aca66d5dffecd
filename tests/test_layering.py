"""Imports point down the layers and their rooms, and each library is imported through its door alone."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What rooms of transfer share: a batch, its end, its permit, and what a transport is.
BATCHES = {"transfer/batch", "transfer/completion", "transfer/transport", "transfer/priority_pool"}

# package, or room of one (a folder with a line of its own) -> what its files may import: a package with its
# rooms, a room, or a file
LAYERS: dict[str, set[str]] = {
    "protos": set(),
    "base": {"protos"},
    "transfer/owned": {"base"},
    "transfer/tcp": {"base", "transfer/owned", *BATCHES},
    "transfer/shm": {"base", "transfer/owned", *BATCHES},
    "transfer/gpu": {"base", "transfer/owned", "transfer/shm", *BATCHES},
    "transfer/rdma": {"base", "transfer/owned", "transfer/tcp", *BATCHES},
    "transfer": {"base", "protos", "transfer"},
    "engine": {"base"},
    "kvstore": {"base", "protos", "transfer"},
    "prefill_node": {"base", "protos", "engine", "transfer", "kvstore"},
    "decode_node": {"base", "protos", "engine", "transfer", "kvstore"},
    "node": {"base", "protos", "engine", "transfer", "kvstore", "prefill_node", "decode_node"},
    "conductor/placing": {"base", "kvstore/index"},
    "conductor/profiles": {"base", "conductor/placing"},
    "conductor/serving": {"base", "protos", "kvstore/index", "conductor/placing"},
    "conductor/api": {"base", "protos", "conductor/serving/generated"},
    "conductor/replay": {"base", "kvstore", "conductor/placing", "conductor/profiles"},
    "conductor": {
        *("base", "conductor/api", "conductor/serving", "conductor/placing", "conductor/profiles"),
        "conductor/replay/arguments",  # names replays' settings, which run in a process of their own
    },
    "bench": {
        "base",
        "protos",
        "engine",
        "transfer",
        "kvstore",
        "prefill_node",
        "decode_node",
        "node",
        "conductor",
        "deploy",
    },
    "deploy": {"base", "conductor"},
}

# file -> what it alone of its package may import too
EXCEPTIONS: dict[str, set[str]] = {
    "deploy/doctor.py": {"transfer/rdma/topology"},  # says which NIC is near which memory
}

# library -> files (or folders, with a slash at the end) that may import it
DOORS: dict[str, tuple[str, ...]] = {
    "accelerate": (),
    "fastapi": (),
    "compressed_tensors": ("engine/published_weights.py",),
    "gguf": ("engine/weights.py",),
    "grafana_foundation_sdk": (),
    "jinja2": ("conductor/api/chat_template.py",),
    "jsonschema": ("conductor/api/schema_narrowing.py", "bench/schemas.py"),
    "llguidance": ("base/grammar.py",),
    "llvmlite": ("engine/kernels/cpu_product.py",),
    "numba": ("engine/kernels/cpu_product.py",),
    "opentelemetry": ("base/tracing.py",),
    "prometheus_client": ("base/metrics.py",),
    "psutil": ("deploy/ports.py",),
    "pydantic": ("conductor/api/", "engine/published_weights.py"),
    "pyverbs": ("transfer/rdma/verbs.py",),
    "ray": ("deploy/launch.py", "deploy/serve_app.py"),
    "redis": ("kvstore/directory.py", "bench/kvstore.py"),
    "rich": ("deploy/", "bench/"),
    "safetensors": (
        "engine/weights.py",
        "engine/model_config.py",
        "engine/stored_weights.py",
    ),
    "starlette": ("conductor/api/",),
    "tokenizers": ("conductor/api/tokenizer.py",),
    "torch": ("engine/", "transfer/gpu/transport.py", "bench/"),
    "transformers": (
        "engine/weights.py",
        "engine/model_config.py",
        "engine/quantization.py",
        "engine/published_weights.py",
        "engine/stored_weights.py",
        "engine/model.py",
        "engine/gpu_model.py",
        "engine/gpu_attention.py",
        "engine/gpu_experts.py",
        "engine/tensor_parallel.py",
        "engine/pipeline.py",
        "engine/real_rotary.py",
        "engine/calibration.py",
        "engine/device_weights.py",
        "bench/",
    ),
    "triton": ("engine/kernels/", "transfer/gpu/kernels/"),
    "typer": ("deploy/", "bench/"),
    "uvicorn": ("conductor/api/", "bench/"),
    "uvloop": ("conductor/__main__.py", "node/process.py", "bench/"),
    "xxhash": ("base/checksum.py",),
    "yaml": ("deploy/config_file.py",),
}


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def imported_packages(file: Path) -> set[str]:
    """Top-level names a file imports, function-local imports included."""
    names: set[str] = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write absolute imports"
            names.add((node.module or "").partition(".")[0])
    return names


@functools.cache
def source_files(package: str) -> list[Path]:
    return [file for file in sorted((ROOT / package).rglob("*.py")) if "_pb2" not in file.name]


ROOMS = {name: tuple(name.split("/")) for name in LAYERS}


def room_of(parts: tuple[str, ...]) -> str | None:
    """Return the innermost room that a path of folders, or of a module, lies in."""
    inside = [name for name, room in ROOMS.items() if parts[: len(room)] == room]
    return max(inside, key=len, default=None)


@functools.cache
def imported_modules(file: Path) -> set[tuple[str, ...]]:
    """Modules of our own that a file imports, as paths."""
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = tuple((node.module or "").split("."))
            for alias in node.names:
                inner = (*module, alias.name)
                folder = ROOT.joinpath(*inner)
                found.add(inner if folder.is_dir() or folder.with_suffix(".py").exists() else module)
    return {parts for parts in found if room_of(parts) is not None}


def files_of(room: str) -> list[Path]:
    """Return the files of a package or room, without those of rooms inside it."""
    files = source_files(room)
    return [file for file in files if room_of(file.relative_to(ROOT).with_suffix("").parts) == room]


def may_import(room: str, file: Path, module: tuple[str, ...]) -> bool:
    more = EXCEPTIONS.get(file.relative_to(ROOT).as_posix(), set())
    allowed = [tuple(name.split("/")) for name in LAYERS[room] | more]
    return room_of(module) == room or any(module[: len(each)] == each for each in allowed)


@pytest.mark.parametrize("room", LAYERS)
def test_imports_point_down(room: str) -> None:
    files = files_of(room)
    assert files, f"{room} has no files: is the test run from a checkout?"
    for file in files:
        upward = {".".join(module) for module in imported_modules(file) if not may_import(room, file, module)}
        assert not upward, f"{file} may not import {sorted(upward)}"


# What placing must not touch: files itself; an event loop, sockets and threads in anything that it imports.
FILES = {"io", "mmap", "os", "pathlib", "shutil", "sys", "tempfile"}
LIVE = {
    "asyncio",
    "concurrent",
    "multiprocessing",
    "selectors",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "threading",
}


def test_placing_is_pure() -> None:
    todo, seen = files_of("conductor/placing"), set[Path]()
    for file in todo:
        calls = [node.func for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call)]
        opens = [
            name for name in calls if isinstance(name, ast.Name) and name.id in ("open", "print", "input")
        ]
        assert not opens, f"{file} touches files"
        assert not imported_packages(file) & FILES, f"{file} touches files"
    while todo:
        file = todo.pop()
        seen.add(file)
        assert not imported_packages(file) & LIVE, f"{file}, which placing imports, is not pure"
        inner = [ROOT.joinpath(*module).with_suffix(".py") for module in imported_modules(file)]
        todo += [each for each in inner if each.is_file() and each not in seen]


def test_no_file_imports_itself_over_others() -> None:
    """A circle is a missing file in the layer below; one that types alone make is one too."""
    ours = [file for package in {name.partition("/")[0] for name in LAYERS} for file in source_files(package)]
    above = {file: {_file_of(module) for module in imported_modules(file)} & set(ours) for file in ours}
    while free := [file for file, below in above.items() if not below & above.keys() - {file}]:
        for file in free:
            del above[file]
    assert not above, f"in circles, or above one: {sorted(str(file.relative_to(ROOT)) for file in above)}"


def _file_of(module: tuple[str, ...]) -> Path:
    path = ROOT.joinpath(*module)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


MOST_ROWS = 14


def test_the_path_of_a_request_is_short_and_of_functions_that_exist() -> None:
    path = (ROOT / "DESIGN.md").read_text().partition("## The path of one request\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \d+ \|.*$", path, re.MULTILINE)
    assert 0 < len(rows) <= MOST_ROWS
    for row in rows:
        steps = re.findall(r"`([\w/]+\.py) : ([\w, ]+)`", row)
        assert steps, row
        for file, functions in steps:
            text = (ROOT / file).read_text()
            gone = [each for each in functions.split(", ") if not re.search(rf"\bdef {each}\(", text)]
            assert not gone, f"DESIGN.md: {file} has no {gone}"


@pytest.mark.parametrize("library", DOORS)
def test_library_has_one_door(library: str) -> None:
    for package in LAYERS:
        for file in source_files(package):
            if library in imported_packages(file):
                name = file.relative_to(ROOT).as_posix()
                assert any(
                    name == door or (door.endswith("/") and name.startswith(door)) for door in DOORS[library]
                ), f"{name} imports {library}, whose door is {DOORS[library]}"
