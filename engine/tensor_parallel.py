"""Tensor parallelism: a finished model cut into ranks from outside, by transformers' own plan.

The plan says of each linear layer whether its columns or its rows are divided. Columns come first: a rank
computes its share of the heads, or of the inner dimension, and needs nobody. Rows come next: each rank's
product is a part of a sum, and one all-reduce makes it whole. So a layer costs two all-reduces, and every
rank ends with the same hidden states. Embeddings, norms and the output head are whole on every rank; of
experts each rank has some.

Cut before anything else is done to a model: what is fused or compiled afterwards sees smaller linear layers
and no difference. Each rank holds its share of the KV heads, so its cache is smaller by as much. All ranks
must run the same steps in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from math import gcd

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from base.errors import ConfigError
from engine.opaque import opaque
from engine.quantized_experts import ExpertWeights, QuantizedExperts
from engine.quantized_linear import QuantizedLinear
from engine.shared_product import linear_of

UNCUT = {"replicated_with_grad_allreduce", "mla_kv_a_proj"}
"""Styles of the plan that leave a module whole; the all-reduce is of gradients."""

EXPERTS_STYLE = "moe_tp_experts"
"""Style of a module of experts. The plan would cut each of them; here each rank has some, whole."""

LATENT_PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_b_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
"""How latent attention is cut by query heads, for families whose plan leaves it out."""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The ranks that hold one model, and which of them this is."""

    group: dist.ProcessGroup
    rank: int
    """Place in the group."""
    size: int
    first_rank: int = 0
    """Rank of the group's first among all ranks."""

    def from_first(self, tensor: torch.Tensor) -> None:
        """Make `tensor` on every rank what it is on rank 0."""
        dist.broadcast(tensor, self.first_rank, group=self.group)

    def least(self, value: int, device: torch.device) -> int:
        """Return the smallest `value` of any rank."""
        values = torch.tensor([value], device=device)
        dist.all_reduce(values, dist.ReduceOp.MIN, group=self.group)
        return int(values.item())


@opaque(lambda *_: None, changes=("part",))
def all_reduce(part: torch.Tensor, group_name: str) -> None:
    """Sum `part` over the ranks, in place. Opaque: the compiler would make a copy for it."""
    dist.all_reduce(part, group=dist.distributed_c10d._resolve_process_group(group_name))  # type: ignore


class RowParallel(nn.Module):
    """A linear layer of which this rank has some of the rows; its output is whole, the bias added once."""

    def __init__(self, linear: nn.Module, bias: torch.Tensor | None, group: TensorGroup) -> None:
        super().__init__()
        self.linear = linear
        self.bias = bias
        # The compiler follows a name, and not a group.
        self._group_name: str = group.group.group_name

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(hidden)
        all_reduce(output, self._group_name)
        return output if self.bias is None else output + self.bias


class ExpertShare(nn.Module):
    """Experts of which this rank has some; each token's sum over all of them is made whole.

    Hidden states are whole on every rank, so no token has to be sent to its experts: each rank computes those
    that it has, and one all-reduce is what a dense layer needs too.
    """

    def __init__(self, experts: nn.Module, group: TensorGroup) -> None:
        """Keep this rank's share of `experts`, in place; raises ValueError if they do not divide."""
        super().__init__()
        is_quantized = isinstance(experts, QuantizedExperts)
        self.num_all: int = experts.num_all if is_quantized else experts.num_experts  # type: ignore[assignment]
        """Experts of all ranks."""
        num_experts = _share_size(self.num_all, group)
        self.first = group.rank * num_experts
        self.num_experts = num_experts
        self.outside = 0
        """Expert that stands for those of other ranks, with a weight of 0."""
        if isinstance(experts, QuantizedExperts):
            experts.keep(self.first, num_experts)
            self.outside = num_experts  # is never written out
        for name, parameter in list(experts.named_parameters(recurse=False)):
            share = nn.Parameter(_share(parameter, 0, group), requires_grad=False)
            setattr(experts, name, share)
        experts.num_experts = num_experts  # type: ignore[assignment]
        self.experts = experts
        self._group_name: str = group.group.group_name

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        local = chosen - self.first
        is_own = (local >= 0) & (local < self.num_experts)
        local, weights = local.where(is_own, self.outside), weights.where(is_own, 0.0)
        output: torch.Tensor = self.experts(hidden, local, weights)
        output = output.contiguous()
        all_reduce(output, self._group_name)
        return output


def cut_causal_model(model: PreTrainedModel, group: TensorGroup) -> None:
    """Keep this rank's share of a causal model, in place; as `cut_model`."""
    config = model.config.get_text_config()
    plan: dict[str, str] = config.base_model_tp_plan or {}
    if plan and getattr(config, "kv_lora_rank", None):
        plan = LATENT_PLAN | plan
    cut_model(model.base_model, plan, heads_of(config), group)


def heads_of(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the attention and the KV heads of a whole model."""
    num_heads: int = config.num_attention_heads
    return num_heads, getattr(config, "num_key_value_heads", None) or num_heads


def require_divisible(heads: tuple[int, int], num_ranks: int) -> None:
    """Raise ConfigError where a model's attention or KV heads do not divide among ranks."""
    if any(count % num_ranks for count in heads):
        raise ConfigError(
            f"tensor_parallel: {heads[0]} attention and {heads[1]} KV heads do not divide among {num_ranks} "
            f"ranks; choose a divisor of {gcd(*heads)}"
        )


def cut_model(model: nn.Module, plan: dict[str, str], heads: tuple[int, int], group: TensorGroup) -> None:
    """Keep this rank's share of a model's linear layers, in place.

    Args:
        model: The decoder that the plan's names start from, such as `LlamaModel`.
        plan: Pattern of module names to style, as `config.base_model_tp_plan`.
        heads: Attention and KV heads of the whole model.

    Raises:
        ConfigError: there is no plan, the heads do not divide, or the plan asks for what is not known here.
            The model may have been cut in part.
    """
    if not plan:
        raise ConfigError("tensor parallel: transformers has no plan for this family")
    require_divisible(heads, group.size)
    to_cut: list[tuple[str, nn.Linear | QuantizedLinear, str]] = []
    experts: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        style = next((style for pattern, style in plan.items() if fnmatch(name, pattern)), None)
        if style is None or style in UNCUT or isinstance(module, ExpertWeights):
            continue
        if style == EXPERTS_STYLE:
            experts.append((name, module))
            continue
        if type(module) not in (nn.Linear, QuantizedLinear) or style not in ("colwise", "rowwise"):
            raise ConfigError(f"tensor parallel: {name} is to be cut {style!r}, which is not known here")
        to_cut.append((name, module, style))
    for name, module in experts:
        with _cutting(name):
            model.set_submodule(name, ExpertShare(module, group))
    _require_whole_experts(model)
    for name, linear, style in to_cut:
        with _cutting(name):
            cut = _cut(linear, style == "colwise", group)
            model.set_submodule(name, cut if style == "colwise" else RowParallel(cut, linear.bias, group))


@contextmanager
def _cutting(name: str) -> Iterator[None]:
    """Raise ConfigError, naming a module, where the body finds that it cannot be cut."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"tensor parallel: {name}: {error}; choose another tensor_parallel") from error


def _require_whole_experts(model: nn.Module) -> None:
    """Raise ConfigError where a rank has read its share of experts, and the plan does not cut them."""
    shares = {module.experts for module in model.modules() if isinstance(module, ExpertShare)}
    for name, module in model.named_modules():
        is_part = isinstance(module, QuantizedExperts) and module.num_experts < module.num_all
        if is_part and module not in shares:
            raise ConfigError(f"tensor parallel: transformers' plan for this family does not cut {name}")


def _cut(linear: nn.Linear | QuantizedLinear, is_by_columns: bool, group: TensorGroup) -> nn.Module:
    """Return this rank's share of a layer; of one that is cut by rows, the bias is added to the sum."""
    bias = None if linear.bias is None or not is_by_columns else _share(linear.bias, 0, group)
    if not isinstance(linear, QuantizedLinear):
        return linear_of(_share(linear.weight, 0 if is_by_columns else 1, group), bias)
    share = _share_size(linear.out_features if is_by_columns else linear.in_features, group)
    kept = linear.quantized.outputs if is_by_columns else linear.quantized.inputs
    return QuantizedLinear(kept(group.rank * share, share), bias)


def _share(tensor: torch.Tensor, dim: int, group: TensorGroup) -> torch.Tensor:
    share = _share_size(tensor.shape[dim], group)
    # A copy: a view would keep the whole weight alive.
    return tensor.detach().narrow(dim, group.rank * share, share).clone(memory_format=torch.contiguous_format)


def _share_size(size: int, group: TensorGroup) -> int:
    if size % group.size:
        raise ValueError(f"{size} experts, rows or columns do not divide among {group.size} ranks")
    return size // group.size
