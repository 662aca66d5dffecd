"""Weights: files to a model. The one door to checkpoint formats.

safetensors and GGUF are data. Pickle is code, so a folder that has nothing else is refused, and no code that
comes with a model is ever run.

`python -m engine.weights GGUF FOLDER` converts a GGUF file to a folder of safetensors, and `python -m
engine.weights FOLDER` looks whether one can be served. Reading GGUF takes a gigabyte and half a minute, which
whoever asks for a model should not hold; so these are processes of their own. They end with status 1 and one
line on standard error when the file or folder cannot be read.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from gguf import GGUFReader
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from base.errors import ConfigError
from engine.layer_patterns import require_quick
from engine.model_config import first_line, loading, model_config
from engine.model_store import SAME_FAMILY, config_table
from engine.published_weights import published_format
from engine.stored_weights import (
    WHOLE,
    Part,
    require_depth,
    require_floats,
    stored_config,
    tensor_headers,
)

MISMATCH = re.compile(
    r"^(\S.*?) *\| MISMATCH .*torch\.Size\((\[.*?\])\).*torch\.Size\((\[.*?\])\)", re.MULTILINE
)
"""A line of transformers' report of a load: name, shape in the files, shape in the model."""

ONE_AT_A_TIME = threading.Lock()
"""The lock that whoever makes a model holds.

Meanwhile transformers replaces a method of all models, and then puts back what it found: of two threads at
once the second puts back the replacement, and from then on no model of this process has an output head that
it shares with its embedding."""


def load_model(path: Path, dtype: torch.dtype, part: Part = WHOLE) -> PreTrainedModel:
    """Load a prepared folder, config.json and safetensors, as a map of its files: what is used is read.

    A checkpoint of few bits keeps them: its linear layers are `QuantizedLinear`s, its experts
    `QuantizedExperts`, of which a rank that will cut the model has its `part` alone read.

    Raises ConfigError, in one line, naming what is missing or unknown."""
    disable_progress_bar()
    with loading(f"{path}: the model cannot be loaded"), ONE_AT_A_TIME, _reported_mismatch():
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            config=_config(path, part),
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    _require_complete(path, found["missing_keys"])
    loaded: PreTrainedModel = model
    return loaded


def _require_complete(path: Path, missing: Iterable[str]) -> None:
    """Raise ConfigError if weights are missing: transformers fills them with random numbers and warns."""
    if names := sorted(missing):
        raise ConfigError(f"{path}: {len(names)} weights are missing, the first is {names[0]}")


@contextmanager
def _reported_mismatch() -> Iterator[None]:
    """Raise ValueError with the first tensor of another shape than the model's, of which transformers' own
    error says that it is in the log."""
    reports: list[str] = []

    def look(record: logging.LogRecord) -> bool:
        reports.append(record.getMessage())
        return True

    library = logging.getLogger("transformers.modeling_utils")
    library.addFilter(look)
    try:
        yield
    except RuntimeError as error:
        if found := next(filter(None, map(MISMATCH.search, reports)), None):
            name, stored, wanted = found.groups()
            raise ValueError(f"{name} is {stored} in the files, and {wanted} by config.json") from error
        raise
    finally:
        library.removeFilter(look)


def _config(path: Path, part: Part) -> PreTrainedConfig:
    """Return a folder's configuration; of few bits, so that `engine/stored_weights.py` reads it."""
    config = model_config(path)
    headers = list(tensor_headers(path))  # refuses files that are not the folder's own
    require_depth(path, headers, getattr(config.get_text_config(), "num_hidden_layers", None))
    published = getattr(config, "quantization_config", None)
    if not published:
        require_floats(path, headers)
        return config
    # What cannot be served is refused before anything is read.
    require_quick(published_format(published).patterns, {name.rpartition(".")[0] for name, *_ in headers})
    config.quantization_config = stored_config(path, published, part)
    return config


def write_tensors(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write tensors that lie on the host as safetensors; raises OSError if they cannot be."""
    try:
        save_file(tensors, file, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(first_line(error)) from error


def tokens_of(path: Path, text: str) -> list[int]:
    """Return the tokens of a text, by the tokenizer in a prepared folder; none: it has no tokenizer."""
    if not (path / "tokenizer.json").is_file():
        return []
    with loading(f"{path}: the tokenizer cannot be loaded"):
        if config_table(path).get("model_type") in SAME_FAMILY:
            # By its name transformers would look for code in the folder.
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
        else:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        token_ids: list[int] = tokenizer(text)["input_ids"]
    return token_ids


def random_model(path: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Make the model that a folder's config.json describes, with weights that nobody trained.

    They are drawn on the device, and equal on all devices of a kind. Speed and hand-off are measured with
    them where no checkpoint is to be had.

    Raises ConfigError if the configuration is missing or of no known family, in one line."""
    with loading(f"{path}: no model can be made"), ONE_AT_A_TIME:
        config = model_config(path)
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    drawn: PreTrainedModel = model.eval()
    return drawn


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file to `folder`, in float32 safetensors.

    Raises ConfigError if the file is not a GGUF file that transformers can read, or not all of it."""
    with loading(f"{gguf}: the GGUF file cannot be read"):
        model, found = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
        _require_complete(gguf, found["missing_keys"])
        _require_all_read(gguf, model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _require_all_read(gguf: Path, model: PreTrainedModel) -> None:
    """Raise ConfigError for what transformers leaves out of a GGUF file without a word, if tokens go by it.

    Such are factors of rotary frequencies, in a tensor (Llama 3.1) or a key, and windows of attention."""
    reader, config = GGUFReader(gguf), model.config
    num_stored = sum(int(tensor.n_elements) for tensor in reader.tensors)
    # A head that is the embedding counts once.
    num_read = sum({each.data_ptr(): each.numel() for each in model.state_dict().values()}.values())
    if num_stored != num_read:
        raise ConfigError(
            f"{gguf}: its tensors have {num_stored} numbers, of which {config.model_type} takes {num_read}: "
            "rope_freqs, for example, is not read; take the model's safetensors"
        )
    if getattr(config, "query_pre_attn_scalar", None) not in (None, getattr(config, "head_dim", None)):
        raise ConfigError(f"{gguf}: how attention is scaled is in no such file; take the model's safetensors")
    for key, field in reader.fields.items():
        value = field.contents()
        is_scaled = key.endswith((".rope.scaling.factor", ".rope.scale_linear")) and value not in (0, 1)
        is_window = key.endswith(".attention.sliding_window") and 0 < value < config.max_position_embeddings
        if is_scaled or (is_window and getattr(config, "sliding_window", None) != value):
            raise ConfigError(f"{gguf}: {key} is {value}, which is not read; take the model's safetensors")


def require_known(path: Path) -> None:
    """Raise ConfigError if a folder's model cannot be served, as far as is seen without reading a weight."""
    with loading(f"{path}: the model cannot be loaded"):
        _config(path, WHOLE)


if __name__ == "__main__":
    try:
        paths = [Path(argument) for argument in sys.argv[1:]]
        convert_gguf(*paths) if paths[1:] else require_known(*paths)
    except ConfigError as error:
        sys.exit(str(error))
