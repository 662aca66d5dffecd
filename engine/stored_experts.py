"""Experts of few bits in a checkpoint: read into the stacked form level for level, with no float copy.

A published checkpoint has the weights of each expert by themselves, `experts.3.up_proj.weight` with its
scales; one that was rounded here has them stacked, `experts.gate_up_proj.levels`. transformers stacks what it
reads into a parameter without scales. So the modules of experts are taken out of a model before it reads, and
made of what the files have afterwards. A rank reads its own experts alone: all of them may be more than the
memory of a host has room for, once for each rank.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
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

from base.errors import ConfigError
from engine.load_progress import LoadProgress
from engine.model_store import weight_files
from engine.nibbles import fits_nibbles
from engine.published_weights import PublishedFormat, weight_of
from engine.quantized_experts import STACKS, ExpertWeights, QuantizedExperts, is_plain
from engine.quantized_weight import QuantizedWeight

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
"""Layers whose experts are read at once: each read from a file waits for its pages."""

Headers = Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]]
"""Dtype and shape of each tensor of each weight."""

Part = tuple[int, int]
"""Rank and number of the ranks that share experts, each with as many as the others."""

WHOLE: Part = (0, 1)

Read = Any
"""Returns the tensor of a name."""


class StoredExperts(nn.Module):
    """The place of experts whose weights lie in a checkpoint's files."""

    def __init__(self, plain: Any, weights: list[str], headers: Headers) -> None:
        """Remember what to read: gate, up and down of each expert, or both stacks."""
        super().__init__()
        self.shapes: tuple[torch.Size, torch.Size] = (plain.gate_up_proj.shape, plain.down_proj.shape)
        self.parts = {name: tuple(headers[name]) for name in weights}
        tensors = [tensor for name in weights for tensor in headers[name].values()]
        self.num_bytes = sum(prod(shape) * DTYPES[dtype].itemsize for dtype, shape in tensors)

    def tensors(self, name: str, read: Read) -> dict[str, torch.Tensor]:
        return {part: read(f"{name}.{part}") for part in self.parts[name]}


def take_experts(model: nn.Module, headers: dict[str, Any]) -> bool:
    """Put `StoredExperts` where a checkpoint has plain experts in few bits; return whether it has any.

    Args:
        headers: Of all weights of few bits; those of experts are removed.

    Raises ConfigError for experts of which some have few bits."""
    places: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
    for name in headers:
        if (match := EXPERT.fullmatch(name)) and match[3] in WEIGHTS:
            places[match[1].replace(*RENAMED)][int(match[2]), WEIGHTS[match[3]]] = name
    is_any = False
    for name, module in list(model.named_modules()):
        if not is_plain(module):
            continue
        weights = _stacks(name, headers) or _weights(name, len(module.gate_up_proj), places[name])
        if weights:
            model.set_submodule(name, StoredExperts(module, weights, headers))
            is_any = True
            for weight in weights:
                del headers[weight]
    return is_any


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


def read_experts(model: nn.Module, path: Path, published: PublishedFormat, part: Part = WHOLE) -> None:
    """Replace each `StoredExperts` by what a folder's files have for it, in place.

    Of stacks, which are maps of their files, nothing is read, and none is left out for `part`.

    Raises ConfigError, naming a weight that does not fit."""
    found = [(name, each) for name, each in model.named_modules() if isinstance(each, StoredExperts)]
    if not found:
        return
    progress = LoadProgress("experts are read", sum(stored.num_bytes for _, stored in found) // part[1])
    with _open(path) as read, ThreadPoolExecutor(READERS, "experts") as pool:
        made = pool.map(partial(_read, read, published, part), (stored for _, stored in found))
        for (name, stored), experts in zip(found, made, strict=True):
            model.set_submodule(name, experts)
            progress.add(stored.num_bytes // part[1])


@contextmanager
def _open(path: Path) -> Iterator[Read]:
    """Give a function that reads a tensor of a folder's files by its name."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for file in weight_files(path):
            tensors = stack.enter_context(safe_open(file, "pt"))
            files |= dict.fromkeys(tensors.keys(), tensors)
        yield lambda name: files[name].get_tensor(name)


def _read(read: Read, published: PublishedFormat, part: Part, stored: StoredExperts) -> QuantizedExperts:
    names = list(stored.parts)
    num_experts = stored.shapes[0][0]
    if len(names) == len(STACKS):
        gate_up, down = (
            _whole(read, published, stored, name, shape)
            for name, shape in zip(names, stored.shapes, strict=True)
        )
    else:
        experts = [names[at : at + 3] for at in range(0, len(names), 3)]
        rank, size = part if num_experts % part[1] == 0 else WHOLE  # else whoever cuts them refuses
        experts = experts[rank * num_experts // size : (rank + 1) * num_experts // size]
        gate_up = _stack(read, published, stored, [each[:2] for each in experts], stored.shapes[0])
        down = _stack(read, published, stored, [each[2:] for each in experts], stored.shapes[1])
    try:
        return QuantizedExperts(gate_up, down, num_experts)
    except ValueError as error:
        raise ConfigError(f"{names[0]} cannot be served as {published.name}: {error}") from error


def _whole(
    read: Read, published: PublishedFormat, stored: StoredExperts, name: str, shape: torch.Size
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
    read: Read, published: PublishedFormat, stored: StoredExperts, experts: list[list[str]], shape: torch.Size
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
