"""Loading a checkpoint of few bits level for level: no float copy of the model is made.

transformers makes the modules of a family and reads floats into them; levels mean nothing to it, and what it
reads of experts it stacks into a parameter without scales. So each linear layer and each module of experts
that the checkpoint has in few bits is taken out of a model before anything is read, and made of what the
files have afterwards: a `QuantizedLinear`, or `QuantizedExperts`. What is `READ_OTHERWISE` is written out.

A published checkpoint has the weights of each expert by themselves, `experts.3.up_proj.weight` with its
scales; one that was rounded here has them stacked, `experts.gate_up_proj.levels`. A rank reads its own
experts alone: all of them may be more than the memory of a host has room for, once for each rank.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from math import prod
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
from engine.load_progress import LoadProgress
from engine.model_store import weight_files
from engine.nibbles import fits_nibbles
from engine.published_weights import PublishedFormat, published_format, weight_of
from engine.quantized_experts import STACKS, ExpertWeights, QuantizedExperts, is_plain
from engine.quantized_linear import READ_OTHERWISE, QuantizedLinear
from engine.quantized_weight import QuantizedWeight
from engine.shared_product import linear_of

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

EXPERT = re.compile(r"(.+\.experts)\.(\d{1,9})\.(\w+)")
"""Name of a weight of one expert: where the experts are, which one, and which weight."""

WEIGHTS = {"gate_proj": 0, "up_proj": 1, "down_proj": 2, "w1": 0, "w3": 1, "w2": 2}
"""Gate, up and down, by the names that checkpoints have for them."""

RENAMED = (".block_sparse_moe.", ".mlp.")
"""Name of the place of experts in a layer, in some checkpoints and in the modules of transformers."""

DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Dtypes of safetensors that the tensors of a layer may have."""

READERS = 8
"""Modules that are read at once: each read from a file waits for its pages."""

TensorHeader = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a tensor."""

Header = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each tensor of a weight."""

Headers = Mapping[str, Header]

Part = tuple[int, int]
"""Rank and number of the ranks that share experts, each with as many as the others."""

WHOLE: Part = (0, 1)

Read = Any
"""Returns the tensor of a name."""


class Stored(nn.Module):
    """The place of a linear layer, or of experts, whose weights lie in a checkpoint's files."""

    def __init__(self, plain: Any, weights: list[str], headers: Headers) -> None:
        """Remember what to read: a layer; gate, up and down of each expert; or both stacks of them."""
        super().__init__()
        names = ("weight",) if type(plain) is nn.Linear else STACKS
        self.shapes: list[torch.Size] = [getattr(plain, name).shape for name in names]
        self.bias = getattr(plain, "bias", None)  # is read by transformers
        self.parts = {name: tuple(headers[name]) for name in weights}
        self.are_apart = len(weights) > len(STACKS)
        """Whether experts' weights lie by themselves."""
        tensors = [tensor for name in weights for tensor in headers[name].values()]
        self.num_bytes = sum(prod(shape) * DTYPES[dtype].itemsize for dtype, shape in tensors)

    def tensors(self, name: str, read: Read) -> dict[str, torch.Tensor]:
        return {part: read(f"{name}.{part}") for part in self.parts[name]}


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
    """Puts `Stored` where the checkpoint has few bits, and makes of it what the files have."""

    quantization_config: StoredConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: object) -> None:
        path = self.quantization_config.path
        ignored: set[str] = set(model._keys_to_ignore_on_load_unexpected or ())
        headers = layer_headers(Path(path))
        found = set(headers)
        take_stored(model, headers)
        is_tied = model.config.get_text_config().tie_word_embeddings
        if is_tied and isinstance(model.get_output_embeddings(), Stored):
            raise ConfigError(
                f"{path}: config.json: tie_word_embeddings is true, and the output head has few bits of its "
                "own: say false"
            )
        model._keys_to_ignore_on_load_unexpected = ignored | set(map(_pattern_of, found - headers.keys()))
        # Of what is left: GLM-4.5 has a layer of the number that its smaller sibling does not read.
        left = [name for name in headers if not any(re.search(pattern, name) for pattern in ignored)]
        if left:
            raise ConfigError(
                f"{path}: {len(left)} tensors of few bits belong to no linear layer of the family, the "
                f"first is {min(left)}: embeddings, and experts with biases or a gate of their own, "
                "cannot be served"
            )

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: object) -> None:
        config = self.quantization_config
        read_stored(model, Path(config.path), published_format(config.published), config.part)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _pattern_of(name: str) -> str:
    """Return a pattern of a weight's tensors that all experts share, and a layer with those of other numbers.

    Each pattern is tried with each name."""
    return r"\.experts\." if ".experts." in name else re.sub(r"\d+", r"\\d+", re.escape(name)) + r"\."


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


def take_stored(model: nn.Module, headers: dict[str, Header]) -> None:
    """Put `Stored` where a checkpoint has linear layers or plain experts in few bits.

    Args:
        headers: Of all weights of few bits; those that are taken are removed.

    Raises ConfigError for experts of which some have few bits."""
    places: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
    for name in headers:
        if (match := EXPERT.fullmatch(name)) and match[3] in WEIGHTS:
            places[match[1].replace(*RENAMED)][int(match[2]), WEIGHTS[match[3]]] = name
    for name, module in list(model.named_modules()):
        weights = [name] if type(module) is nn.Linear and name in headers else []
        if is_plain(module):
            weights = _stacks(name, headers) or _weights(name, len(module.gate_up_proj), places[name])
        if weights:
            model.set_submodule(name, Stored(module, weights, headers))
        for weight in weights:
            del headers[weight]


def _stacks(name: str, headers: Headers) -> list[str]:
    stacks = [f"{name}.{stack}" for stack in STACKS]
    return stacks if all(stack in headers for stack in stacks) else []


def _weights(name: str, num_experts: int, found: Mapping[tuple[int, int], str]) -> list[str]:
    """Return the names of gate, up and down of each expert; nothing if none has few bits."""
    if not found:
        return []
    # Not all that a configuration may name: what is missing is found after as many as there are.
    wanted = ((expert, weight) for expert in range(num_experts) for weight in range(3))
    beyond = [place for place in found if place[0] >= num_experts]
    odd = next((place for place in wanted if place not in found), None) or min(beyond, default=None)
    if odd is not None:
        raise ConfigError(
            f"{name}: config.json has {num_experts} experts, some of them have few bits, and "
            f"{('gate', 'up', 'down')[odd[1]]} of expert {odd[0]} is not as the others; they cannot be served"
        )
    return [found[place] for place in product(range(num_experts), range(3))]


def read_stored(model: PreTrainedModel, path: Path, published: PublishedFormat, part: Part = WHOLE) -> None:
    """Replace each `Stored` by what a folder's files have for it, in place.

    Levels that are as they lie stay maps of their files, of which nothing is read: so all stacks are whole.

    Raises ConfigError, naming a weight that does not fit."""
    found = [(name, each) for name, each in model.named_modules() if isinstance(each, Stored)]
    sizes = [stored.num_bytes // (part[1] if stored.are_apart else 1) for _, stored in found]
    progress = LoadProgress("levels are read", sum(sizes))
    with _open(path) as read, ThreadPoolExecutor(READERS, "levels") as pool:
        made = pool.map(partial(_read, read, published, part, model.dtype), (stored for _, stored in found))
        for (name, _), module, size in zip(found, made, sizes, strict=True):
            model.set_submodule(name, module)
            progress.add(size)


@contextmanager
def _open(path: Path) -> Iterator[Read]:
    """Give a function that reads a tensor of a folder's files by its name."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for file in weight_files(path):
            tensors = stack.enter_context(safe_open(file, "pt"))
            files |= dict.fromkeys(tensors.keys(), tensors)
        yield lambda name: files[name].get_tensor(name)


def _read(
    read: Read, published: PublishedFormat, part: Part, dtype: torch.dtype, stored: Stored
) -> nn.Module:
    names = list(stored.parts)
    if len(names) == 1:
        return _layer(read, published, dtype, stored, names[0])
    num_experts = stored.shapes[0][0]
    if stored.are_apart:
        experts = [names[at : at + 3] for at in range(0, len(names), 3)]
        rank, size = part if num_experts % part[1] == 0 else WHOLE  # else whoever cuts them refuses
        experts = experts[rank * num_experts // size : (rank + 1) * num_experts // size]
        gate_up = _stack(read, published, stored, [each[:2] for each in experts], stored.shapes[0])
        down = _stack(read, published, stored, [each[2:] for each in experts], stored.shapes[1])
    else:
        gate_up, down = (
            _whole(read, published, stored, name, shape)
            for name, shape in zip(names, stored.shapes, strict=True)
        )
    try:
        return QuantizedExperts(gate_up, down, num_experts)
    except ValueError as error:
        raise ConfigError(f"{names[0]} cannot be served as {published.name}: {error}") from error


def _layer(
    read: Read, published: PublishedFormat, dtype: torch.dtype, stored: Stored, name: str
) -> nn.Module:
    out_features, in_features = stored.shapes[0]
    weight = weight_of(published, name, stored.tensors(name, read), (out_features, in_features))
    if name.rpartition(".")[2] in READ_OTHERWISE:
        return linear_of(weight.dequantized(dtype), stored.bias)
    return QuantizedLinear(weight, stored.bias)


def _whole(
    read: Read, published: PublishedFormat, stored: Stored, name: str, shape: torch.Size
) -> ExpertWeights:
    """Return the weights of all experts, which lie in a file as they are: the map of it is not copied."""
    tensors = stored.tensors(name, read)
    if any(tensor.dim() != 3 for tensor in tensors.values()):
        raise ConfigError(f"{name}: {', '.join(tensors)} have no dimension of experts")
    rows = {part: tensor.flatten(0, 1) for part, tensor in tensors.items()}
    weight = _levels_of(published, name, rows, (shape[0] * shape[1], shape[2]))
    zeros = None if weight.zeros is None else weight.zeros.view(*shape[:2], -1)
    levels, scales = (part.view(*shape[:2], -1) for part in (weight.levels, weight.scales))
    return ExpertWeights(levels, scales, weight.group, zeros)


def _stack(
    read: Read, published: PublishedFormat, stored: Stored, experts: list[list[str]], shape: torch.Size
) -> ExpertWeights:
    """Return the weights of all experts; of each, those of the names given follow each other."""
    made: ExpertWeights | None = None
    for expert, names in enumerate(experts):
        size = shape[1] // len(names)
        for place, name in enumerate(names):
            weight = _levels_of(published, name, stored.tensors(name, read), (size, shape[2]))
            # Not before one was found to be as large as the configuration says.
            made = made or ExpertWeights.room_for(len(experts), shape[1], weight)
            try:
                made.put(expert, place * size, weight)
            except ValueError as error:
                raise ConfigError(f"{name}: {error}") from error
    assert made is not None
    return made


def _levels_of(
    published: PublishedFormat, name: str, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]
) -> QuantizedWeight:
    weight = weight_of(published, name, tensors, shape)
    if weight.zeros is not None and not fits_nibbles(weight):
        raise ConfigError(
            f"{name}: zero points of experts can be served of four bits alone, and as whole numbers"
        )
    return weight
