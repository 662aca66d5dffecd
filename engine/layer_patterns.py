"""Layers that a checkpoint's configuration names, or has patterns of: these are tried before they are used.

Python's patterns may take time that doubles with each character of a name, and nothing can end one that does.
So all of a configuration's are first matched with all names in a process of its own, which has seconds of a
processor: `python -m engine.layer_patterns`, with JSON on standard input, says nothing if all is well.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cached_property

from base.errors import ConfigError

PATTERN = "re:"
"""The beginning of an entry that is a pattern; others are names of layers, or of their kind."""

KINDS = frozenset({"Linear", "Module"})
"""Names of the kind of every layer that has few bits."""

PROCESSOR_S = 5
"""A hundred patterns and the names of 60,000 layers take one."""

MEMORY_BYTES = 1 << 30


class LayerNames:
    """The layers that some entries of a configuration name."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._names = frozenset(entries)
        self._patterns = patterns_of(entries)

    @cached_property
    def _matches(self) -> list[re.Pattern[str]]:
        # Not before `require_quick` has seen them.
        return list(map(re.compile, self._patterns))

    def __contains__(self, layer: str) -> bool:
        is_named = layer in self._names or not KINDS.isdisjoint(self._names)
        return is_named or any(pattern.match(layer) for pattern in self._matches)


def patterns_of(entries: Iterable[str]) -> list[str]:
    return [entry.removeprefix(PATTERN) for entry in entries if entry.startswith(PATTERN)]


def require_quick(patterns: Sequence[str], names: Iterable[str]) -> None:
    """Raise ConfigError if one of the patterns is none, or they take too long with these names."""
    if not patterns:
        return
    tried = subprocess.run(
        [sys.executable, "-m", "engine.layer_patterns"],
        input=json.dumps([PROCESSOR_S, patterns, list(names)]),
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode == 0:
        return
    where = "quantization_config: ignore, targets"
    if tried.stdout:
        raise ConfigError(f"{where}: {tried.stdout}")
    if tried.returncode > 0:  # not ended by a signal, as for its seconds
        reason = tried.stderr.strip().rpartition("\n")[2] or f"status {tried.returncode}"
        raise ConfigError(f"{where}: the patterns could not be tried: {reason:.200}")
    raise ConfigError(
        f"{where}: {len(patterns)} patterns take more than {PROCESSOR_S} s of a processor with the names of "
        f"this model's layers, the first is {patterns[0][:80]!r}; name the layers, or repeat nothing that is "
        "repeated, as (a+)+ does"
    )


def main() -> int:
    most_s, patterns, names = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for pattern in patterns:
        try:
            match = re.compile(pattern).match
        except (re.error, RecursionError, OverflowError) as error:
            sys.stdout.write(f"{pattern[:80]!r} is no pattern: {error}")
            return 1
        for name in names:
            match(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
