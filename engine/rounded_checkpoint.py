"""A checkpoint of floats, rounded once: the folder that every later start of its nodes loads.

Fitting levels to a text takes a minute for eight billion weights, and reading floats takes twice as long as
reading bytes. So the first node of a host that is asked for a format writes what it rounded to a folder,
under a lock, and loads it from there, as do all others: nodes of one cache have the same levels. A folder
appears by a rename and never changes. Its name says which floats, which format, and which rounding.

Beside it lie the logits of the floats for some tokens, so that each start states how far it is off.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from base.errors import ConfigError
from base.logs import event
from engine.calibration import TEXT
from engine.quantized_linear import QuantizedLinear
from engine.quantized_weight import WeightFormat
from engine.weights import write_tensors

log = logging.getLogger(__name__)

ROUNDING = "3"
"""Part of a folder's name; grows when the same floats become other levels."""

LOGITS = "source_logits.npy"


def rounded_name(model_id: str, weight_format: WeightFormat, dtype: torch.dtype) -> str:
    """Return the name of the folder that has a model's weights in a format."""
    text = hashlib.sha256(TEXT.read_bytes()).hexdigest()[:8]
    return f"{model_id}-{weight_format.value}-{str(dtype).removeprefix('torch.')}-{ROUNDING}-{text}"


def write_rounded(module: PreTrainedModel, logits: torch.Tensor | None, folder: Path) -> bool:
    """Write a model of `QuantizedLinear`s, and perhaps `QuantizedExperts`, for `load_model` to read.

    False: there is no room, and nothing is left."""
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            draft = Path(work) / "model"
            draft.mkdir()
            write_tensors(_tensors(module), draft / "model.safetensors")
            if logits is not None:
                np.save(draft / LOGITS, logits.float().cpu().numpy(), allow_pickle=False)
            (draft / "config.json").write_text(json.dumps(_config(module), indent=1) + "\n")
            draft.rename(folder)
    except OSError as error:
        event(log, "rounded weights are not kept", folder=str(folder), error=str(error))
        return False
    size = (folder / "model.safetensors").stat().st_size
    event(log, "rounded weights are kept", folder=str(folder), gigabytes=round(size / 1e9, 2))
    return True


def source_logits(folder: Path) -> torch.Tensor:
    """Return the logits of the floats, [num_tokens, vocab_size] float32.

    Raises ConfigError if they cannot be read."""
    try:
        return torch.from_numpy(np.load(folder / LOGITS, allow_pickle=False))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: {LOGITS} cannot be read, remove the folder: {error}") from error


def _tensors(module: PreTrainedModel) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = dict(module.state_dict())
    for name, layer in module.named_modules():
        if isinstance(layer, QuantizedLinear):
            weight = layer.quantized
            parts = {"levels": weight.levels, "scales": weight.scales, "zeros": weight.zeros}
            found |= {f"{name}.{part}": tensor for part, tensor in parts.items() if tensor is not None}
    # A tied head has the tensor of the embeddings, which is written once.
    once = {tensor.data_ptr(): name for name, tensor in reversed(found.items())}
    return {name: found[name].contiguous().cpu() for name in once.values()}


def _config(module: PreTrainedModel) -> dict[str, object]:
    config: dict[str, object] = json.loads(module.config.to_json_string(use_diff=True))
    head = module.get_output_embeddings()
    if isinstance(head, QuantizedLinear):
        config["tie_word_embeddings"] = False  # the head has levels of its own
    config["quantization_config"] = {"quant_method": "conductor"}
    return config
