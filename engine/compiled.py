"""Regional compilation: one decoder layer is compiled and shared by all.

The layers of a model differ in their weights alone, which the compiler takes as inputs, so the cost is one
layer's: seconds instead of minutes. Sizes are dynamic in the number of tokens; a step of one token is
compiled by itself.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from engine.fused_projections import four_bit_product, product, quantized_product
from engine.kernels.best_few import best_few

aten = torch.ops.aten

MAX_VARIANTS = 32
"""Number of compiled variants of a layer: step of one token, of many, with chunks, times windows or none."""


class OwnOperators(CustomGraphPass):
    """Graph pass: leave one of matrix products that are equal in every argument, and pick experts ourselves.

    `fused_projections.py` makes such products. Inductor removes common subexpressions from training graphs
    and not from inference graphs. Of `torch.topk` it makes no code.

    Its kernels are not launched early (`dependent_launch.py`) where one may read nothing: such a kernel does
    not wait for the one before it, and ends first; what the next one reads of the first is not there yet.
    """

    PURE = frozenset(
        {
            aten.mm.default,
            aten.addmm.default,
            aten.permute.default,
            aten.t.default,
            aten.view.default,
            aten.reshape.default,
            aten._unsafe_view.default,
            product,
            quantized_product,
            four_bit_product,
        }
    )

    def __call__(self, graph: fx.Graph) -> None:
        if any(map(_reads_nothing, graph.nodes)):
            config.triton.enable_pdl = False  # of this graph: the options are put back after it
        for node in graph.find_nodes(op="call_function", target=aten.topk.default):
            # dim and largest; what is left out has its default
            scores, count, dim, is_largest = (list[Any](node.args) + [-1, True][len(node.args) - 2 :])[:4]
            if is_largest and dim in (-1, scores.meta["val"].dim() - 1):
                node.target, node.args = best_few, (scores, count)
        first: dict[tuple[object, str, str], fx.Node] = {}
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in self.PURE:
                key = (node.target, str(node.args), str(node.kwargs))
                if key in first:
                    node.replace_all_uses_with(first[key])
                    graph.erase_node(node)
                else:
                    first[key] = node

    def uuid(self) -> str:
        """Return the name of this pass in the compiler's cache, which outlives this process."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _reads_nothing(node: fx.Node) -> bool:
    """Return whether a node makes a tensor of no other."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    sources = (source.meta.get("val") for source in node.all_input_nodes)
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    return is_tensor and not any(isinstance(source, torch.Tensor) for source in sources)


# One object: a compiled variant is shared by those who ask with equal options.
# The compiler's kernels begin while the one before them ends, as ours do (`dependent_launch.py`).
OPTIONS: dict[str, Any] = {"post_grad_custom_pre_pass": OwnOperators(), "triton.enable_pdl": True}


def compile_layers(layers: nn.ModuleList) -> None:
    """Compile `forward` of the modules of `layers` in place, on their next call."""
    # One for each kind of step and of layer; fullgraph makes a layer beyond that an error.
    torch._dynamo.config.recompile_limit = MAX_VARIANTS
    # A layer's numbers are constants. As inputs they have the first layers traced twice: our operators take
    # no such inputs.
    torch._dynamo.config.specialize_float = True
    for layer in layers:
        layer.forward = compiled(layer.forward)


STEADY_ROTARIES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend on a place alone; others look at the longest prompt."""


def compile_around(decoder: nn.Module) -> None:
    """Compile what a decoder has beside its layers, in place: its last norm, and the angles of positions.

    Eager, each is up to ten launches of two microseconds, in steps of four milliseconds."""
    for name, module in decoder.named_children():
        is_rotary = getattr(module, "rope_type", None) in STEADY_ROTARIES and "rotary" in name
        weights = dict(module.named_parameters())
        is_norm = name.endswith("norm") and all(weight.dim() == 1 for weight in weights.values())
        if is_norm or (is_rotary and "forward" not in vars(module)):
            module.forward = compiled(module.forward)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as it will be compiled on its next call."""
    result: Callable[..., Any] = torch.compile(function, dynamic=True, fullgraph=True, options=OPTIONS)
    return result
