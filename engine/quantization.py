"""Quantisation at start: a model loaded with weights of the format asked for, and how far that puts it off.

A float checkpoint is quantised as it is loaded; one that is published with few bits keeps them. The logits of
some tokens are computed with the source's weights, and once the model is as it will be served again: the
error is in the log, and the node says it when it attaches.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from base.config import EngineConfig
from base.errors import ConfigError
from base.logs import event
from engine.calibration import TEXT, quantize_for_text
from engine.model import PagedModel
from engine.quantized_linear import QuantizedLinear, quantize_linears, unrounded_rows
from engine.quantized_weight import FLOATS, Quantization, WeightFormat
from engine.self_check import checked_tokens, relative_error
from engine.weights import load_model, random_model, tokens_of

log = logging.getLogger(__name__)

CALIBRATED = (WeightFormat.FP8, WeightFormat.INT4)
"""Formats whose levels are fitted to a text; those of 8-bit integers are close enough together without."""

LARGEST_ERROR = 1.2
"""Logits that have nothing to do with each other are 1.4 apart."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """A model in transformers' modules, its linear layers perhaps with few bits."""

    module: PreTrainedModel
    format: str = "none"
    """Format of the layers; several, if they differ; none: floats."""
    source_logits: torch.Tensor | None = None
    """[num_tokens, vocab_size] of the weights that were quantised; None: floats are served as they are."""

    def stated(self, model: PagedModel) -> Quantization:
        """Return what the node says of its weights: `model` is made of them, as it will be served."""
        if self.source_logits is None:
            return FLOATS
        error = relative_error(model.eager_logits(checked_tokens(model.vocab_size)), self.source_logits)
        # Written so that NaN is a failure.
        if not error < LARGEST_ERROR:
            raise ConfigError(
                f"quantization: in {self.format} the model's logits are off by {error:.2g} of their "
                "size: it says something else than its source; choose a format of more bits, or none"
            )
        event(log, "weights are quantised", format=self.format, logits_off_by=round(error, 4))
        return Quantization(self.format, error)


def load_weights(
    config: EngineConfig, model_path: str, dtype: torch.dtype, device: torch.device
) -> LoadedWeights:
    """Load a prepared model, and quantise it if the configuration says so.

    Raises ConfigError if it cannot be loaded, or not be quantised."""
    load = random_model if config.random_weights else load_model
    module = load(Path(model_path), dtype, device)
    if published := [each for each in module.modules() if isinstance(each, QuantizedLinear)]:
        formats = "+".join(sorted({layer.quantized.format.value for layer in published}))
        if config.quantization != "none":
            raise ConfigError(
                f"quantization: {config.quantization} is asked for, and the checkpoint is published in "
                f"{formats}: say none"
            )
        return LoadedWeights(module, formats, _published_logits(module))
    return quantised_weights(module, config.quantization, None if config.random_weights else Path(model_path))


def quantised_weights(
    module: PreTrainedModel, quantization: str, folder: Path | None = None
) -> LoadedWeights:
    """Quantise a model of floats in place, as `quantization` of the configuration says.

    `folder` is as for `quantize`. Raises ConfigError if it cannot be."""
    if quantization == "none":
        return LoadedWeights(module)
    weight_format = WeightFormat(quantization)
    logits = _logits(module)
    quantize(module, weight_format, folder)
    return LoadedWeights(module, weight_format.value, logits)


def quantize(module: PreTrainedModel, weight_format: WeightFormat, folder: Path | None) -> None:
    """Round the linear layers of a finished model, in place, as a node does that loads it.

    Args:
        folder: Of its tokenizer; None: weights that nobody trained have no text that fits them.

    Raises ConfigError if it has weights that cannot be rounded."""
    head = module.get_output_embeddings()
    token_ids = tokens_of(folder, TEXT.read_text()) if folder and weight_format in CALIBRATED else []
    if token_ids:
        quantize_for_text(module, weight_format, head, token_ids)
    else:
        quantize_linears(module, weight_format, head)


def _published_logits(module: PreTrainedModel) -> torch.Tensor:
    """Return the logits of the very numbers that were published: no activation is rounded."""
    with unrounded_rows(module):
        return _logits(module)


@torch.inference_mode()
def _logits(module: PreTrainedModel) -> torch.Tensor:
    vocab_size = module.config.get_text_config().vocab_size
    token_ids = torch.tensor([checked_tokens(vocab_size)], device=module.device)
    logits: torch.Tensor = module(input_ids=token_ids, use_cache=False).logits[0]
    return logits
