"""The last layer of a prompt: K and V of all tokens, everything else for the tokens that are sampled.

Nobody reads what the last layer makes of a prompt's other tokens. So a step with chunks runs that layer
twice: once for all tokens, of which the compiler keeps what leads to K and V and drops the rest as unused,
and once for the last token of each sequence, like a decode step over the cache. Of a model of 32 layers that
saves 3 % of a prefill, more of one with few layers. Queries are made with K and V, in one product: apart they
would save 0.2 %, and a decode step would share no compiled layer with the others.

It works from outside on a finished layer: every tensor argument that has a row for each token is cut to the
wanted rows. A model that goes on with the shape of its input after its last layer cannot be served so
(`can_be_cut`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from engine.gpu_attention import StepCall, StepPart, chunks_of

Forward = Callable[..., Any]


def of_wanted_rows(run: Forward, keep_kv: Forward) -> Forward:
    """Return what takes the place of a last layer's `forward`.

    `run`, the present one, makes the wanted rows, [1, num_rows, hidden_size]; in a step of decoding, all.
    `keep_kv` is given all rows, and has no result."""

    def forward(hidden: torch.Tensor, *arguments: Any, paged: StepCall, **named: Any) -> Any:
        if not chunks_of(paged.header):
            return run(hidden, *arguments, paged=paged, **named)
        keep_kv(hidden, *arguments, paged=paged._replace(part=StepPart.KEEP_KV), **named)
        num_tokens = hidden.shape[1]
        return run(
            hidden[:, paged.rows],
            *(_wanted(item, paged.rows, num_tokens) for item in arguments),
            paged=paged._replace(part=StepPart.LAST_ROWS),
            **{name: _wanted(item, paged.rows, num_tokens) for name, item in named.items()},
        )

    return forward


def dropping_result(forward: Forward) -> Forward:
    """Return `forward` without its result: compiled, only what it writes is left of it."""

    def run(*arguments: Any, **named: Any) -> None:
        forward(*arguments, **named)

    return run


def can_be_cut(model: nn.Module, layers: nn.ModuleList) -> bool:
    """Return whether a model takes fewer rows from its last layer than it gave to its first.

    GPT-2 and those made after it call their layers `h`, and give the result the shape of the input; the
    others take it as it is.
    """
    return any(module is layers and name.endswith("layers") for name, module in model.named_modules())


def _wanted(argument: Any, rows: torch.Tensor, num_tokens: int) -> Any:
    """Return the wanted rows of an argument [1, num_tokens, ...], and any other as it is."""
    if isinstance(argument, tuple | list):
        return type(argument)(_wanted(item, rows, num_tokens) for item in argument)
    if isinstance(argument, torch.Tensor) and argument.dim() >= 2 and argument.shape[1] == num_tokens:
        return argument[:, rows]
    return argument
