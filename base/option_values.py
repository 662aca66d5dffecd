"""Values of command lines: each option's bounds are checked where it is read, before anything runs.

    add("--stages", type=whole(1, 64))        a whole number from 1 to 64
    add("--headroom", type=real(0, 1, above=True))

argparse prints the option's name before what is raised here, so a message says only what is wanted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from math import inf, isnan
from pathlib import Path

from base.errors import ConfigError

MAX_DIGITS = 40
"""Characters of a number. Python takes seconds for one of a million digits."""


def require_writable(option: str, path: Path) -> None:
    """Raise ConfigError where what a command makes cannot be written under the name that an option gave."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: no file can be written there")


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` to `most`."""

    def number(text: str) -> int:
        try:
            value = int(text) if len(text) <= MAX_DIGITS else None
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"a whole number from {least} to {most} is wanted, not {text[:MAX_DIGITS]!r}"
            )
        return value

    return number


def real(
    least: float, most: float = inf, *, above: bool = False, finite: bool = True
) -> Callable[[str], float]:
    """Return a reader of numbers from `least` to `most`.

    Args:
        least: The lowest, or with `above` what they are more than.
        most: The highest.
        above: Whether `least` itself is refused.
        finite: Whether infinity is refused.
    """
    bounds = f"{'more than' if above else 'at least'} {least:g}"
    if most < inf:
        bounds += f" and at most {most:g}"
    elif finite:
        bounds += ", not infinite"

    def number(text: str) -> float:
        try:
            value = float(text) if len(text) <= MAX_DIGITS else None
        except ValueError:
            value = None
        is_good = value is not None and not isnan(value) and least <= value <= most
        if not is_good or (above and value == least) or (finite and value == inf):
            raise argparse.ArgumentTypeError(f"a number of {bounds} is wanted, not {text[:MAX_DIGITS]!r}")
        assert value is not None
        return value

    return number
