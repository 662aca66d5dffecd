"""Whether loading blocks is sooner done than computing them, learned from both on this node.

The conductor predicts for the whole cluster from a profile; a node knows better what its own
memory, disk and device take, and decides last. Seconds per token of computing are a mean, the
newest counting most. Of loads from each place the better of the last two counts, because one that
took long may have met a process that stood still. So what was tried less than twice is tried; what
was passed over fades until it is tried again, and no disk is avoided for ever. Pure.
"""

from __future__ import annotations

GAIN = 0.2
"""Weight of the newest measurement."""
FADE = 0.98
"""Share of a cost that is left each time it decided against loading: half after 35 times."""
UNTRIED = (0.0, 0.0)


class LoadCosts:
    """Learned by one node. Belongs to the event loop."""

    def __init__(self, block_tokens: int) -> None:
        """Begin. `block_tokens`: in one block."""
        self._block_tokens = block_tokens
        self._compute_s = 0.0
        """Seconds to compute a token; 0: unknown."""
        self._load_s: dict[str, tuple[float, float]] = {}
        """Seconds to load a block, by the place where it lies: the last two, newest last; 0: not tried."""

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Learn from a prefill of `num_tokens` tokens that were not in the cache."""
        if num_tokens > 0:
            self._compute_s = _mixed(self._compute_s, seconds / num_tokens)

    def loaded(self, place: str, num_blocks: int, seconds: float) -> None:
        """Learn from a load; one that brought nothing cost its seconds all the same, and was not quick."""
        if not num_blocks:
            self.ended_early(place, 1, seconds)
            return
        _, before_s = self._load_s.get(place, UNTRIED)
        self._load_s[place] = before_s, seconds / num_blocks

    def ended_early(self, place: str, num_blocks: int, seconds: float) -> None:
        """Learn from a load of `num_blocks` that failed or was cancelled: none came sooner than its share."""
        _, before_s = self._load_s.get(place, UNTRIED)
        self._load_s[place] = before_s, max(seconds / max(1, num_blocks), before_s)

    def is_worth(self, place: str) -> bool:
        """Return whether blocks should be loaded from `place` rather than computed."""
        before_s, newest_s = self._load_s.get(place, UNTRIED)
        if not self._compute_s or min(before_s, newest_s) < self._compute_s * self._block_tokens:
            return True
        self._load_s[place] = before_s * FADE, newest_s * FADE
        return False


def _mixed(mean: float, newest: float) -> float:
    return mean + GAIN * (newest - mean) if mean else newest
