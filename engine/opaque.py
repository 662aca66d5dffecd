"""Operators that the compiler does not look into, registered so that a call costs the host little.

`torch.library.custom_op` goes through Python four times a call, for gradients and checks that serving has no
use for: 19 us where this takes 3 (one core, torch 2.13). A layer has five of them and a long chunk's are not
captured, so that is a tenth of a millisecond a layer, which the GPU of a small layer waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "conductor"
LIBRARY: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def opaque(like: Callable[..., Any], changes: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes an operator of a function, of the same name, without gradients.

    Args:
        like: Returns what the function would, with anything for numbers.
        changes: The arguments that the function writes to.
    """

    def register(function: Callable[..., Any]) -> Any:
        name = function.__name__
        LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=changes))
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", like, lib=LIBRARY)
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return register
