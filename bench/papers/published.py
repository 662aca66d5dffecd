"""What the papers publish, by the trace that it was measured on.

F is FAST'25, A is arXiv 2407.00079. Figures marked ~ where they are shown were read off plots. A trace is
known by what its publishers say of it, the number of its requests and its length; of our imitations
(`generate.py`) by their names. A trace that nobody published anything on has no row.
"""

from __future__ import annotations

from conductor.replay.trace import Trace

SIZES = {"conversation": (12_031, 3_537.0), "synthetic": (3_993, 1_022.0), "toolagent": (23_608, 3_600.0)}
"""(requests, seconds) of the public traces."""

FIG5 = {"conversation": (19.65, 5.27, 3.58, 3.07)}
"""Mean TTFT of random, load, local, global; 16 nodes, their split not stated."""

FIG8 = {"conversation": (1.66, 1.07), "toolagent": (1.12, 0.53), "synthetic": (2.02, 0.73)}
"""Seconds of prefill a request, without a cache and with one that holds everything."""

FIG9 = {
    "conversation": {1: 0.087, 3: 0.17, 5: 0.247, 15: 0.34, 50: 0.398},
    "toolagent": {1: 0.386, 2: 0.414, 4: 0.484, 5: 0.505, 8: 0.544, 10: 0.561, 50: 0.595},
}
"""Token hit rate of one LRU cache, by millions of tokens."""
FIG9_MILLIONS = (1, 3, 5, 15, 50)

FIG10 = {
    "conversation": (0.170, 0.376, 1.38, 1.05),
    "toolagent": (0.422, 0.582, 0.70, 0.52),
    "synthetic": (0.265, 0.624, 1.50, 0.79),
}
"""Hit rate and seconds of prefill: local, global, local, global."""

FIG13 = {"synthetic": {24: 5.09, 40: 2.40, 80: 1.73, 100: 1.60, 160: 1.41, 320: 1.25}}
"""Mean TTFT by bandwidth in Gbps."""
FIG13_GBPS = (24, 40, 80, 100, 160, 320)
FIG13_RECOMPUTED_S = {"synthetic": 2.62}

FIG15_TTFT_S = {"synthetic": (5.74, 1.71, 1.30, 1.19, 1.12, 1.11, 1.14)}
FIG15_TBT_MS = {"synthetic": (31.6, 31.9, 33.0, 35.2, 38.4, 44.3, 58.4)}
FIG15_CAPACITY = {"synthetic": (77.7, 97.2, 99.1, 99.0, 99.2, 98.4, 86.1)}
"""Splits from 5P11D to 11P5D."""


def known_trace(trace: Trace) -> str | None:
    """Return which of the papers' traces this is, or imitates; None: none of them."""
    name, _, imitated = trace.name.partition(" (generated)")
    if trace.name.endswith("(generated)") and name in SIZES and not imitated:
        return name
    for known, (count, span_s) in SIZES.items():
        if len(trace.requests) == count and abs(trace.span_s - span_s) < 0.01 * span_s:
            return known
    return None
