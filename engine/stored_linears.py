"""Loading a checkpoint of few bits through transformers, which knows its names and files.

transformers makes the modules of a family and reads tensors into parameters of equal names. So each linear
layer that the checkpoint has in few bits is replaced, before anything is read, by one with parameters as the
files have them, and afterwards by a `QuantizedLinear` of what they mean. No float copy of the model is made.
Experts are read by `stored_experts.py`; a layer that is `READ_OTHERWISE` is written out as floats.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from base.errors import ConfigError
from engine.model_store import weight_files
from engine.published_weights import PublishedFormat, published_format, weight_of
from engine.quantized_linear import READ_OTHERWISE, QuantizedLinear
from engine.stored_experts import DTYPES, WHOLE, Part, read_experts, take_experts

METHOD = "conductor"
"""Name of our reader among transformers' quantisers."""

FLOATS = ("F16", "BF16", "F32", "F64")
"""Dtypes of weights that are what they are."""

MOST_TIMES = 8
"""Times that a family may count the layers that it has."""

LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d{1,9})\.")
"""The number of a decoder layer in a tensor's name."""

UNUSED = ("bias", "input_scale", "k_scale", "v_scale", "q_scale", "activation_scale")
"""Tensors that say nothing of a weight: activations are scaled row by row, and KV has a format of its own."""

MARKS = {"weight_packed", "weight_scale", "weight_scale_inv", "qweight", "levels"}
"""Tensors that a layer of few bits has one of."""

TensorHeader = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a tensor."""

Header = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each tensor of a layer."""


class StoredLinear(nn.Module):
    """A linear layer with parameters as a checkpoint has them."""

    def __init__(self, plain: nn.Linear, header: Header) -> None:
        super().__init__()
        self.shape = (plain.out_features, plain.in_features)
        self.bias = plain.bias
        for name, (dtype, shape) in header.items():
            like = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
            self.register_parameter(name, nn.Parameter(like, requires_grad=False))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: item.data for name, item in self.named_parameters(recurse=False) if name != "bias"}


@register_quantization_config(METHOD)
class StoredConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The configuration that transformers gets in place of a checkpoint's own."""

    def __init__(self, path: str, published: dict[str, Any], part: Part = WHOLE, **_: object) -> None:
        self.quant_method = METHOD
        self.part = part
        self.path = path
        self.published = published


@register_quantizer(METHOD)
class StoredQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts `StoredLinear`s where the checkpoint has few bits, and takes them away when they are read."""

    quantization_config: StoredConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: object) -> None:
        ignored: set[str] = set(model._keys_to_ignore_on_load_unexpected or ())
        headers = {
            name: header
            for name, header in layer_headers(Path(self.quantization_config.path)).items()
            if not any(re.search(pattern, name) for pattern in ignored)
        }
        if take_experts(model, headers):
            model._keys_to_ignore_on_load_unexpected = ignored | {r"\.experts\."}
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and name in headers:
                model.set_submodule(name, StoredLinear(module, headers.pop(name)))
        if headers:
            raise ConfigError(
                f"{self.quantization_config.path}: {len(headers)} tensors of few bits belong to no linear "
                f"layer of the family, the first is {min(headers)}: embeddings, and experts with biases or a "
                "gate of their own, cannot be served"
            )

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: object) -> None:
        found = published_format(self.quantization_config.published)
        for name, module in list(model.named_modules()):
            if isinstance(module, StoredLinear):
                model.set_submodule(name, _read(name, module, found, model.dtype))
        config = self.quantization_config
        read_experts(model, Path(config.path), found, config.part)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def stored_config(path: Path, published: dict[str, Any], part: Part = WHOLE) -> dict[str, Any]:
    """Return the `quantization_config` that has transformers load a folder, and a part of its experts."""
    return {"quant_method": METHOD, "path": str(path), "published": published, "part": part}


def require_floats(path: Path, headers: Iterable[TensorHeader]) -> None:
    """Raise ConfigError if a folder has weights of few bits: without a configuration they mean nothing."""
    for name, dtype, _ in headers:
        part = name.rpartition(".")[2]
        if part in MARKS or (part == "weight" and dtype not in FLOATS):
            raise ConfigError(
                f"{path}: {name} is {dtype}, and config.json has no quantization_config at its top that says "
                "what it means; it cannot be served"
            )


def require_depth(path: Path, headers: Sequence[TensorHeader], num_layers: object) -> None:
    """Raise ConfigError if a configuration names many times the layers that a folder's files have.

    All of them would be made before the first one is missed. Some families count a layer several times."""
    # Counted: a tensor of a layer far beyond the others would make room for all between.
    found = {match[1] for name, _, _ in headers if (match := LAYER.search(name))}
    # Where a family has other names, a layer has a tensor at least.
    count = len(found) or len(headers)
    if isinstance(num_layers, int) and num_layers > MOST_TIMES * count:
        raise ConfigError(f"{path}: config.json: num_hidden_layers is {num_layers}, the files have {count}")


def tensor_headers(path: Path) -> Iterator[TensorHeader]:
    """Yield what the files of a folder's weights say of each tensor; raises ConfigError as `weight_files`."""
    for file in weight_files(path):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 it is no dict
                found = tensors.get_slice(name)
                yield name, found.get_dtype(), tuple(found.get_shape())


def layer_headers(path: Path) -> dict[str, Header]:
    """Return the tensors of each layer that a folder's files have in few bits, by the layer's name.

    Raises ConfigError for a tensor of a dtype that no format has."""
    layers: dict[str, Header] = defaultdict(dict)
    for name, dtype, shape in tensor_headers(path):
        layer, _, part = name.rpartition(".")
        if part not in UNUSED:
            layers[layer][part] = dtype, shape
    for layer, header in layers.items():
        for part, (dtype, _) in header.items():
            if dtype not in DTYPES:
                raise ConfigError(f"{path}: {layer}.{part} is {dtype}; known: {', '.join(DTYPES)}")
            if dtype.startswith("F8") and not header.keys() & MARKS:
                raise ConfigError(f"{path}: {layer}.{part} is {dtype}, and its scales are missing")
    return {layer: header for layer, header in layers.items() if header.keys() & MARKS}


def _read(
    name: str, layer: StoredLinear, published: PublishedFormat, dtype: torch.dtype
) -> QuantizedLinear | nn.Linear:
    weight = weight_of(published, name, layer.tensors(), layer.shape)
    if name.rpartition(".")[2] not in READ_OTHERWISE:
        return QuantizedLinear(weight, layer.bias)
    plain = nn.Linear(1, 1, bias=False, device="meta")
    plain.out_features, plain.in_features = layer.shape
    plain.weight = nn.Parameter(weight.dequantized(dtype), requires_grad=False)
    plain.bias = layer.bias
    return plain
