"""`python -m bench.start`: seconds from nothing to the first token of a node's engine, start by start.

A checkpoint of a known model's shape with random weights is written to a folder, as published ones are. Each
start is a process of its own: it loads the folder, checks itself, compiles, captures its graphs and answers
one prompt. The first start rounds weights and compiles, later ones find both. The files are in the page cache
unless `--cold` drops them before each start. Programs are installed with their bytecode: where the machine
writes none, as images often are set up, the first start writes it for the later ones.

    python -m bench.start --model 8b --quantization fp8 --kv-dtype fp8 --starts 3
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from base.clock import SystemClock
from base.config import WEIGHT_FORMATS, EngineConfig
from base.lifetime import spare_collector
from bench.about_run import about_run, write_result
from bench.engine_grammar import write_tokenizer
from bench.engine_shapes import SHAPES
from bench.engine_work import Driver, Prompts
from bench.shapes import write_model
from engine.build import assemble_engine, load_rank
from engine.weights import random_model

SHARD_BYTES = 5_000_000_000


def write_checkpoint(name: str, folder: Path) -> int:
    """Write random weights of a shape as published checkpoints are, and return their bytes."""
    model = write_model(name, folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = random_model(Path(model.path), torch.bfloat16, device)
    module.save_pretrained(model.path, max_shard_size=SHARD_BYTES)
    write_tokenizer(folder, module.config.vocab_size)
    return sum(file.stat().st_size for file in Path(model.path).glob("*.safetensors"))


def drop_pages(folder: Path) -> None:
    """Let the kernel forget the files of a folder, so that they are read from the disk."""
    for file in folder.rglob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def with_bytecode(folder: Path) -> dict[str, str]:
    """Return this process's environment, but bytecode is written: to `folder` where it is written nowhere."""
    environment = dict(os.environ)
    if environment.pop("PYTHONDONTWRITEBYTECODE", None):
        environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    return environment


async def start(config: EngineConfig, folder: str, rounded: Path) -> dict[str, float]:
    """Start an engine in this process, have one answer of it, and return the seconds of each part.

    `ready_at_s` is the moment of the first token, on the clock that all processes of a machine share.
    """
    spare_collector()  # as a node's process does
    marks = [time.perf_counter()]
    model = load_rank(config, folder, None, rounded)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    marks.append(time.perf_counter())
    engine = assemble_engine(config, model, SystemClock())
    marks.append(time.perf_counter())
    driver = Driver(engine, Prompts(engine.vocab_size, seed=0))
    await driver.prefill_s(100, 1)
    marks.append(time.perf_counter())
    ready_at_s = time.monotonic()
    await driver.close()
    names = ("weights_s", "check_s", "first_token_s")
    seconds = (after - before for before, after in itertools.pairwise(marks))
    parts = dict(zip(names, seconds, strict=True))
    return {**parts, "ready_at_s": ready_at_s, "error": model.quantization.error}


def _child(options: argparse.Namespace) -> None:
    config = EngineConfig(
        device="auto",
        block_size=64,
        kv_cache_gib=options.kv_cache_gib,
        quantization=options.quantization,
        kv_dtype=options.kv_dtype,
    )
    print(json.dumps(asyncio.run(start(config, options.folder, Path(options.folder) / "rounded" / "model"))))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__)
    parser.add_argument("--model", choices=sorted({*SHAPES, "tiny"}), default="8b")
    parser.add_argument("--quantization", choices=WEIGHT_FORMATS, default="none")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--kv-cache-gib", type=float, default=20.0)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="read the files from the disk at each start")
    parser.add_argument("--folder", default="", help="of a checkpoint that is there; empty: write one")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.child:
        _child(options)
        return
    with tempfile.TemporaryDirectory() as work:
        folder = Path(options.folder or work)
        if not options.folder:
            print(f"{write_checkpoint(options.model, folder) / 1e9:.1f} GB written", flush=True)
        rows = []
        for number in range(options.starts):
            if options.cold:
                drop_pages(folder)
            command = [sys.executable, "-m", "bench.start", "--child", "--folder", str(folder)]
            command += ["--quantization", options.quantization, "--kv-dtype", options.kv_dtype]
            command += ["--kv-cache-gib", str(options.kv_cache_gib)]
            began_s = time.monotonic()
            finished = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True, env=with_bytecode(Path(work))
            )
            parts = json.loads(finished.stdout.splitlines()[-1])
            row = {"start": number, "seconds": parts.pop("ready_at_s") - began_s, **parts}
            print(json.dumps(row), flush=True)
            rows.append(row)
    result = {
        "bench": "start",
        "about": about_run("torch", "transformers"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "model": options.model,
        "quantization": options.quantization,
        "kv_dtype": options.kv_dtype,
        "files": "from the disk" if options.cold else "in the page cache",
        "rows": rows,
    }
    write_result(options.out, result)


if __name__ == "__main__":
    main()
