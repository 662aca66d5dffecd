"""Quantisation at start: a model loaded with weights of the format asked for, and how far that puts it off.

A float checkpoint is quantised when it is first loaded; one that is published with few bits keeps them. The
logits of some tokens are computed with the source's weights, and once the model is as it will be served
again: the error is in the log, and the node says it when it attaches.

Fitting levels to a text takes a minute for eight billion weights, and reading floats takes twice as long as
reading bytes. So the first node of a host that is asked for a format writes what it rounded to a folder,
under a lock, and loads it from there, as do all others: nodes of one cache have the same levels. A folder
appears by a rename and never changes. Its name says which floats, which format, and which rounding. Beside it
lie the logits of the floats, so that each start states how far it is off.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from base.config import EngineConfig
from base.errors import ConfigError
from base.logs import event
from engine.calibration import TEXT, quantize_for_text
from engine.device_weights import visiting
from engine.model import PagedModel, first_run
from engine.model_store import locked
from engine.quantized_experts import QuantizedExperts
from engine.quantized_linear import QuantizedLinear, unrounded_rows
from engine.quantized_weight import FLOATS, Quantization, WeightFormat
from engine.self_check import checked_tokens, relative_error, require_numbers
from engine.stored_weights import WHOLE, Part
from engine.weights import load_model, random_model, tokens_of, write_tensors

log = logging.getLogger(__name__)

CALIBRATED = (WeightFormat.FP8, WeightFormat.INT4)
"""Formats whose levels are fitted to a text; those of 8-bit integers are close enough together without."""

ROUNDING = "3"
"""Part of a folder's name; grows when the same floats become other levels."""

LOGITS = "source_logits.npy"

LARGEST_ERROR = 1.2
"""Logits that have nothing to do with each other are 1.4 apart."""


@dataclass(slots=True)
class LoadedWeights:
    """A model in transformers' modules, its linear layers perhaps with few bits."""

    module: PreTrainedModel
    format: str = "none"
    """Format of the layers; several, if they differ; none: floats."""
    source_logits: torch.Tensor | None = None
    """[num_tokens, vocab_size] of the weights that the levels stand for; None: not computed yet."""

    def compute_source(self) -> None:
        """Take the numbers that were published for the source: no activation is rounded.

        Every rank of a model that is cut calls this, once its share is on its device."""
        if self.format != "none" and self.source_logits is None:
            with unrounded_rows(self.module):
                self.source_logits = logits_of(self.module, self.module.device)

    def stated(self, model: PagedModel) -> Quantization:
        """Return what the node says of its weights: `model` is made of them, as it will be served."""
        if self.source_logits is None:
            return FLOATS
        require_numbers(self.source_logits)
        logits = model.eager_logits(checked_tokens(model.vocab_size))
        error = relative_error(logits, self.source_logits.to(logits))
        # Written so that NaN is a failure.
        if not error < LARGEST_ERROR:
            raise ConfigError(
                f"quantization: in {self.format} the model's logits are off by {error:.2g} of their "
                "size: it says something else than its source; choose a format of more bits, or none"
            )
        event(log, "weights are quantised", format=self.format, logits_off_by=round(error, 4))
        return Quantization(self.format, error)


def load_weights(
    config: EngineConfig,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    rounded: Path | None = None,
    part: Part = WHOLE,
) -> LoadedWeights:
    """Load a prepared model, and quantise it if the configuration says so.

    It is on the host, or on the device that rounded it.

    Args:
        device: What computes while weights are rounded.
        rounded: The name of the model's rounded weights in a cache, without the format; None: keep none.
        part: What `cut_causal_model` will keep of experts; the others of a published checkpoint are not read.

    Raises ConfigError if it cannot be loaded, or not be quantised."""
    if config.random_weights:
        return quantised_weights(random_model(folder, dtype, device), config.quantization)
    if config.quantization == "none":
        module = load_model(folder, dtype, part)
        return LoadedWeights(module, _published_formats(module) or "none")
    weight_format = WeightFormat(config.quantization)
    if rounded is None:
        return _rounded(folder, weight_format, dtype, device)
    kept = rounded.with_name(rounded_name(rounded.name, weight_format, dtype))
    if not kept.is_dir():
        with locked(kept.with_name(f"{kept.name}.lock")):
            # Whoever held the lock may have written it.
            if not kept.is_dir():
                made = _rounded(folder, weight_format, dtype, device)
                if not write_rounded(made.module, made.source_logits, kept):
                    return made
    return LoadedWeights(load_model(kept, dtype), weight_format.value, source_logits(kept))


def _rounded(
    folder: Path, weight_format: WeightFormat, dtype: torch.dtype, device: torch.device
) -> LoadedWeights:
    module = load_model(folder, dtype)
    if formats := _published_formats(module):
        raise ConfigError(
            f"quantization: {weight_format.value} is asked for, and the checkpoint is published in "
            f"{formats}: say none"
        )
    return quantised_weights(module, weight_format.value, folder, device)


def _published_formats(module: PreTrainedModel) -> str:
    layers = [each for each in module.modules() if isinstance(each, QuantizedLinear)]
    formats = {layer.quantized.format.value for layer in layers}
    experts = [each for each in module.modules() if isinstance(each, QuantizedExperts)]
    formats |= {part.format.value for each in experts for part in (each.gate_up_proj, each.down_proj)}
    return "+".join(sorted(formats))


def quantised_weights(
    module: PreTrainedModel,
    quantization: str,
    folder: Path | None = None,
    device: torch.device | None = None,
) -> LoadedWeights:
    """Quantise a model of floats in place, as `quantization` of the configuration says.

    `folder` and `device` are as for `quantize`. Raises ConfigError if it cannot be."""
    if quantization == "none":
        return LoadedWeights(module)
    weight_format = WeightFormat(quantization)
    device = device or module.device
    with visiting(module, device):
        logits = logits_of(module, device)
    quantize(module, weight_format, folder, device)
    return LoadedWeights(module, weight_format.value, logits)


def quantize(
    module: PreTrainedModel,
    weight_format: WeightFormat,
    folder: Path | None,
    device: torch.device | None = None,
) -> None:
    """Round the linear layers and experts of a finished model, in place, as a node does that loads it.

    Args:
        folder: Of its tokenizer; None: weights that nobody trained have no text that fits them.
        device: What computes, where the model is on the host; None: where it is.

    Raises ConfigError if it has weights that cannot be rounded."""
    head = module.get_output_embeddings()
    token_ids = tokens_of(folder, TEXT.read_text()) if folder and weight_format in CALIBRATED else []
    quantize_for_text(module, weight_format, head, token_ids, device)


@torch.inference_mode()
def logits_of(module: PreTrainedModel, device: torch.device) -> torch.Tensor:
    """Return the logits [num_tokens, vocab_size] of some tokens, which the family computes by itself."""
    vocab_size = module.config.get_text_config().vocab_size
    token_ids = torch.tensor([checked_tokens(vocab_size)], device=device)
    with first_run():
        logits: torch.Tensor = module(input_ids=token_ids, use_cache=False).logits[0]
    return logits


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
