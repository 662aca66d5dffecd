"""Published weights of few bits: what the tensors of a checkpoint mean. The one door to its formats.

compressed-tensors reads its own formats and AutoAWQ's, and says which layer has which; transformers reads the
configuration of fine-grained fp8. GPTQ is read here: what else reads it comes with kernels of its own. Each
format ends as a `QuantizedWeight`, level for level; what a CPU rounds again is in `integer_product.py`.

What cannot be served is refused by name before a weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from pydantic import ValidationError
from transformers import FineGrainedFP8Config

from base.errors import ConfigError
from engine.layer_patterns import LayerNames, patterns_of
from engine.quantized_weight import FORMATS as LEVELS
from engine.quantized_weight import GROUPS, QuantizedWeight, WeightFormat, packed

Tensors = Mapping[str, torch.Tensor]
"""The tensors of one layer, by the last part of their names."""

LARGEST_LEVEL = 448.0
"""The largest level of any format, of e4m3."""

NO_NUMBER = 0x7F
"""The byte, less its sign, of the one e4m3 level that is no number; there is no infinite one."""


class PublishedFormat(Protocol):
    """Reads the layers of one checkpoint."""

    name: str

    patterns: Sequence[str]
    """Patterns of layers' names that it goes by; `require_quick` comes before the first weight."""

    def weight(self, layer: str, tensors: Tensors, shape: tuple[int, int]) -> QuantizedWeight:
        """Return the weight, [out_features, in_features], that a layer's tensors mean.

        Raises ValueError or KeyError for tensors that do not fit the format."""
        ...


def published_format(config: Mapping[str, Any]) -> PublishedFormat:
    """Return what reads the layers of a checkpoint with this `quantization_config`.

    Raises ConfigError, naming what cannot be served."""
    method = config.get("quant_method")
    make = FORMATS.get(str(method))
    if make is None:
        known = ", ".join(FORMATS)
        raise ConfigError(f"quantization_config: quant_method {method!r} cannot be served; known: {known}")
    try:
        return make(config)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"quantization_config: {method}: {where}: {first['msg']}") from error
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"quantization_config: {method}: {reason}") from error


def weight_of(
    published: PublishedFormat, layer: str, tensors: Tensors, shape: tuple[int, int]
) -> QuantizedWeight:
    """Return the weight, [out_features, in_features], that a layer's tensors mean.

    Raises ConfigError, naming the layer, for tensors that do not fit the format or the shape."""
    try:
        weight = published.weight(layer, tensors, shape)
    except (ValueError, LookupError, RuntimeError, TypeError, ArithmeticError, re.error) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        raise ConfigError(f"{layer} cannot be served as {published.name}: {reason}") from error
    if not (weight.scales * LARGEST_LEVEL).isfinite().all():
        raise ConfigError(f"{layer}: its scales are not all finite numbers; the checkpoint is damaged")
    if (weight.out_features, weight.in_features) != shape:
        raise ConfigError(
            f"{layer}: its levels are [{weight.out_features}, {weight.in_features}], the model's "
            f"[{shape[0]}, {shape[1]}]"
        )
    wanted = shape[0], -(-shape[1] // max(1, weight.group))
    if weight.scales.shape != wanted:
        raise ConfigError(f"{layer}: its scales are {list(weight.scales.shape)}; {list(wanted)} are wanted")
    return weight


class CompressedTensors:
    """Reads compressed-tensors: levels packed or plain, by the scheme of the layer's group."""

    name = "compressed-tensors"

    def __init__(self, config: Mapping[str, Any]) -> None:
        # Its import takes a second, and most models have floats.
        from compressed_tensors.quantization import QuantizationConfig  # noqa: PLC0415

        _refuse_keys(config, ("sparsity_config", "transform_config"))
        parsed = QuantizationConfig.model_validate(dict(config))
        for name, scheme in parsed.config_groups.items():
            _require_scheme(name, scheme, parsed.format)
        ignored, schemes = parsed.ignore or (), list(parsed.config_groups.values())
        targets = [entry for scheme in schemes for entry in scheme.targets]
        self.patterns: Sequence[str] = patterns_of([*ignored, *targets])
        self._ignored = LayerNames(ignored)
        self._schemes = [(LayerNames(scheme.targets), scheme) for scheme in schemes]

    def weight(self, layer: str, tensors: Tensors, shape: tuple[int, int]) -> QuantizedWeight:
        from compressed_tensors.compressors.pack_quantized.helpers import (  # noqa: PLC0415
            unpack_from_int32,
        )

        arguments = self._scheme(layer).weights
        scales = tensors["weight_scale"]
        zeros = tensors.get("weight_zero_point") if not arguments.symmetric else None
        if "weight_packed" in tensors:
            levels = unpack_from_int32(tensors["weight_packed"], arguments.num_bits, torch.Size(shape))
            if zeros is not None and zeros.dtype == torch.int32:
                size = torch.Size((shape[0], scales.shape[-1]))
                zeros = unpack_from_int32(zeros, arguments.num_bits, size, packed_dim=0)
        else:
            levels = tensors["weight"]
        block = arguments.block_structure or (1, arguments.group_size or -1)
        if arguments.strategy == "tensor":
            block = (-1, -1)
        _require_order(tensors.get("weight_g_idx"), shape[1], block[1])
        return levels_of(arguments.num_bits, levels, _of_blocks(scales, shape, block), block[1], zeros)

    def _scheme(self, layer: str) -> Any:
        if layer in self._ignored:
            raise ValueError("it has few bits, and quantization_config.ignore names it")
        for targets, scheme in self._schemes:
            if layer in targets:
                return scheme
        raise ValueError("no group of quantization_config.config_groups has a target that names it")


def _require_scheme(name: str, scheme: Any, usual: str) -> None:
    """Raise ValueError unless the layers of a scheme can be served."""
    weights = scheme.weights
    if weights is None:
        raise ValueError(f"{name} has no weights")
    if (weights.type, weights.num_bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise ValueError(f"{name}: weights of {weights.num_bits} bits ({weights.type}) cannot be served")
    if weights.strategy not in ("tensor", "channel", "group", "block"):
        raise ValueError(f"{name}: the strategy {weights.strategy!r} cannot be served")
    stored = scheme.format or usual
    known = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    if stored not in known:
        raise ValueError(f"{name}: the format {stored!r} cannot be served; known: {', '.join(known)}")
    rows = scheme.input_activations
    if rows is not None and rows.num_bits != 8:
        raise ValueError(f"{name}: activations of {rows.num_bits} bits cannot be served")
    if scheme.output_activations is not None:
        raise ValueError(f"{name}: output_activations cannot be served")


class FineGrainedFp8:
    """Reads transformers' fp8, which DeepSeek-V3 is published in: blocks of levels, each with a scale."""

    name = "fp8"
    patterns: Sequence[str] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        known = {key: value for key, value in config.items() if key != "quant_method"}
        self._config = FineGrainedFP8Config(**known)
        if self._config.expert_dtype != "fp8":
            raise ValueError(f"expert_dtype {self._config.expert_dtype!r} cannot be served")
        block = self._config.weight_block_size or ()
        if any(type(size) is not int for size in block):
            raise ValueError(f"weight_block_size {block!r:.100}: two whole numbers are wanted")
        if config.get("fmt", "e4m3") != "e4m3":
            raise ValueError(f"fmt {config['fmt']!r} cannot be served")
        if self._config.modules_to_convert:
            raise ValueError("modules_to_convert: embeddings of few bits cannot be served")

    def weight(self, layer: str, tensors: Tensors, shape: tuple[int, int]) -> QuantizedWeight:
        block = tuple(self._config.weight_block_size or (-1, -1))
        scales = _of_blocks(tensors["weight_scale_inv"], shape, block)
        return levels_of(8, tensors["weight"], scales, block[1], None)


class AutoAwq:
    """Reads AutoAWQ, which compressed-tensors rewrites as its own format."""

    name = "awq"
    patterns: Sequence[str] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter  # noqa: PLC0415

        self._converter = AutoAWQConverter.from_autoawq_config({**config, "modules_to_not_convert": None})
        self._converter.ignore = []
        self._own = CompressedTensors(self._converter.update_config(None).model_dump(mode="json"))

    def weight(self, layer: str, tensors: Tensors, shape: tuple[int, int]) -> QuantizedWeight:
        named = {f"{layer}.{name}": tensor for name, tensor in tensors.items()}
        read = self._converter.process(named)
        own = {name.rpartition(".")[2]: tensor for name, tensor in read.items()}
        return self._own.weight(layer, own, shape)


class Gptq:
    """Reads GPTQ: levels packed along the inputs, unsigned, with a zero point for each group."""

    name = "gptq"
    patterns: Sequence[str] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._bits = config.get("bits")
        if self._bits not in (4, 8):
            raise ValueError(f"bits: {self._bits!r:.100} cannot be served; known: 4, 8")
        stored = config.get("checkpoint_format") or "gptq"
        if stored not in ("gptq", "gptq_v2"):
            raise ValueError(f"checkpoint_format {stored!r} cannot be served; known: gptq, gptq_v2")
        # The first format keeps zero points less one.
        self._missing = 1 if stored == "gptq" else 0
        if config.get("dynamic"):
            raise ValueError("dynamic: bits that differ between layers cannot be served")

    def weight(self, layer: str, tensors: Tensors, shape: tuple[int, int]) -> QuantizedWeight:
        bits = int(self._bits or 0)
        scales = tensors["scales"].t().contiguous()
        group = -(-shape[1] // scales.shape[1])
        _require_order(tensors.get("g_idx"), shape[1], group)
        middle = 1 << (bits - 1)
        levels = _fields(tensors["qweight"].t(), bits) - middle
        zeros = _fields(tensors["qzeros"], bits).t()[: shape[0]] + (self._missing - middle)
        return levels_of(bits, levels, scales, group, zeros)


class Rounded:
    """Reads what `engine/quantization.py` writes: levels and scales as a `QuantizedWeight` has them."""

    name = "conductor"
    patterns: Sequence[str] = ()

    def weight(self, layer: str, tensors: Tensors, shape: tuple[int, int]) -> QuantizedWeight:
        levels, scales, zeros = tensors["levels"], tensors["scales"], tensors.get("zeros")
        kind = LEVELS.get(levels.dtype)
        if kind is None:
            raise ValueError(f"levels are {levels.dtype}")
        group = -(-shape[1] // max(1, scales.shape[-1]))
        num_groups = -(-shape[1] // max(1, group))
        for name, part in (("scales", scales), ("zeros", zeros)):
            if part is not None and (part.shape != (shape[0], num_groups) or part.dtype != torch.float32):
                raise ValueError(f"{name} are {tuple(part.shape)} of {part.dtype}")
        return QuantizedWeight(kind, levels, scales, group, zeros)


def _require_order(order: torch.Tensor | None, in_features: int, group: int) -> None:
    """Raise ValueError where the groups of inputs, if a checkpoint has them, are not one after the other."""
    if order is not None and not torch.equal(order.cpu().long(), torch.arange(in_features) // group):
        raise ValueError("its inputs are in another order (desc_act), which cannot be served")


def _fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the unsigned numbers that lie in each row of words of 32 bits, lowest first, as int16."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    fields = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return fields.flatten(1).to(torch.int16)


def _of_blocks(scales: torch.Tensor, shape: tuple[int, int], block: Any) -> torch.Tensor:
    """Return scales [out_features, num_groups] of scales for each block of outputs and inputs; -1: all.

    Raises ValueError for scales that are not one for each block."""
    out_features, in_features = shape
    outputs, inputs = (
        max(1, min(size, whole) if size > 0 else whole) for size, whole in zip(block, shape, strict=True)
    )
    rows, columns = -(-out_features // outputs), -(-in_features // inputs)
    # One for each output, or for all, may stand without a dimension of one.
    fitting = [(rows, columns), *([(rows,)] if columns == 1 else []), *([()] if rows * columns == 1 else [])]
    if tuple(scales.shape) not in fitting:
        raise ValueError(
            f"scales of {tuple(scales.shape)} do not fit blocks of {outputs} outputs and {inputs} inputs: "
            f"{(rows, columns)} are wanted"
        )
    scales = scales.reshape(rows, columns)
    return scales if rows == out_features else scales.repeat_interleave(outputs, 0)[:out_features]


def levels_of(
    bits: int, levels: torch.Tensor, scales: torch.Tensor, group: int, zeros: torch.Tensor | None
) -> QuantizedWeight:
    """Return the weight of plain levels; zero points of nothing but zeros are left out.

    Args:
        group: Inputs that share a scale, where there are several groups.

    Raises ValueError for groups that cannot be served, for scales that are whole numbers, and for levels that
    are no numbers: the self-check's tokens need not hit the expert that has them, and a request's do."""
    if not scales.is_floating_point():
        # Such as exponents of two alone; as floats these are what others are.
        raise ValueError(f"scales are {scales.dtype}, and must be floats")
    scales = scales.float().contiguous()
    if scales.shape[1] == 1:
        group = levels.shape[1]
    elif group not in GROUPS:
        raise ValueError(f"groups of {group} inputs cannot be served; known: 32, 64, 128")
    if zeros is not None:
        zeros = zeros.float().reshape(scales.shape).contiguous() if zeros.any() else None
    if levels.dtype == torch.float8_e4m3fn:
        # Of bytes: `isnan` takes 60 times as long.
        if levels.numel() and (levels.view(torch.uint8) & NO_NUMBER).max() == NO_NUMBER:
            raise ValueError("levels are not all numbers; the checkpoint is damaged")
        return QuantizedWeight(WeightFormat.FP8, levels.contiguous(), scales, group, zeros)
    if levels.is_floating_point() or levels.dtype == torch.bool:
        raise ValueError(f"levels are {levels.dtype}; whole numbers or float8_e4m3fn are wanted")
    if bits == 8:
        return QuantizedWeight(WeightFormat.INT8, levels.to(torch.int8).contiguous(), scales, group, zeros)
    if levels.shape[1] % 2:
        raise ValueError("4 bits of an odd number of inputs cannot be served")
    return QuantizedWeight(WeightFormat.INT4, packed(levels.to(torch.int8)), scales, group, zeros)


def _refuse_keys(config: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key in keys:
        value = config.get(key)
        is_none = not value or (isinstance(value, Mapping) and value.get("format") == "dense")
        if not is_none:
            raise ValueError(f"{key} cannot be served")


FORMATS: dict[str, Callable[[Mapping[str, Any]], PublishedFormat]] = {
    "compressed-tensors": CompressedTensors,
    "fp8": FineGrainedFp8,
    "awq": AutoAwq,
    "gptq": Gptq,
    "conductor": lambda _: Rounded(),
}
"""Reader of each `quant_method`."""
