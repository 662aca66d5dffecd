"""Imports point down the layers, and each library is imported through its door alone."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS: dict[str, set[str]] = {
    "protos": set(),
    "base": {"protos"},
    "transfer": {"base", "protos"},
    "engine": {"base"},
    "kvstore": {"base", "protos", "transfer"},
    "prefill_node": {"base", "protos", "engine", "transfer", "kvstore"},
    "decode_node": {"base", "protos", "engine", "transfer", "kvstore"},
    "conductor": {"base", "protos", "kvstore"},
    "bench": {
        "base",
        "protos",
        "engine",
        "transfer",
        "kvstore",
        "prefill_node",
        "decode_node",
        "conductor",
        "deploy",
    },
    "deploy": {
        "base",
        "protos",
        "engine",
        "transfer",
        "kvstore",
        "prefill_node",
        "decode_node",
        "conductor",
    },
}

# library -> files (or folders, with a slash at the end) that may import it
DOORS: dict[str, tuple[str, ...]] = {
    "accelerate": (),
    "fastapi": ("conductor/",),
    "gguf": ("engine/weights.py",),
    "grafana_foundation_sdk": ("deploy/dashboards.py",),
    "jinja2": ("conductor/chat_template.py",),
    "opentelemetry": ("base/tracing.py",),
    "prometheus_client": ("base/metrics.py",),
    "pydantic": ("deploy/config_file.py", "conductor/openai_schema.py"),
    "pyverbs": ("transfer/rdma.py",),
    "ray": ("deploy/launch.py", "deploy/ray_resources.py", "deploy/serve_app.py"),
    "redis": ("kvstore/directory.py",),
    "rich": ("deploy/", "bench/"),
    "safetensors": ("engine/weights.py",),
    "tokenizers": ("conductor/tokenizer.py",),
    "torch": ("engine/", "transfer/cuda_ipc.py", "bench/"),
    "transformers": (
        "engine/weights.py",
        "engine/model.py",
        "engine/gpu_model.py",
        "engine/gpu_attention.py",
        "engine/tensor_parallel.py",
        "engine/pipeline.py",
        "bench/",
    ),
    "triton": ("engine/kernels/", "transfer/kernels/"),
    "typer": ("deploy/", "bench/"),
    "uvicorn": ("conductor/", "bench/"),
    "uvloop": ("conductor/__main__.py", "deploy/node.py", "bench/"),
    "xxhash": ("base/checksum.py",),
    "yaml": ("deploy/config_file.py",),
}


@functools.cache
def imported_packages(file: Path) -> set[str]:
    """Top-level names a file imports, function-local imports included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write absolute imports"
            names.add((node.module or "").partition(".")[0])
    return names


@functools.cache
def source_files(package: str) -> list[Path]:
    return [file for file in sorted((ROOT / package).rglob("*.py")) if "_pb2" not in file.name]


@pytest.mark.parametrize("package", LAYERS)
def test_imports_point_down(package: str) -> None:
    files = source_files(package)
    assert files, f"{package} has no files: is the test run from a checkout?"
    for file in files:
        upward = imported_packages(file) & LAYERS.keys() - LAYERS[package] - {package}
        assert not upward, f"{file} may not import {sorted(upward)}"


@pytest.mark.parametrize("library", DOORS)
def test_library_has_one_door(library: str) -> None:
    for package in LAYERS:
        for file in source_files(package):
            if library in imported_packages(file):
                name = file.relative_to(ROOT).as_posix()
                assert any(
                    name == door or (door.endswith("/") and name.startswith(door)) for door in DOORS[library]
                ), f"{name} imports {library}, whose door is {DOORS[library]}"
