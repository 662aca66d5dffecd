"""A rate that fades: what came a second, the latest counting most."""

from __future__ import annotations

from math import exp

# A burst counts for so many seconds.
FADES_S = 4.0


class FadingRate:
    """An amount a second, over the last `FADES_S` or so. Moments never go back."""

    def __init__(self) -> None:
        self._rate = self._at_s = 0.0

    def add(self, amount: float, now_s: float) -> None:
        """Count an amount that came at this moment."""
        self._rate = self.at(now_s) + amount / FADES_S
        self._at_s = now_s

    def at(self, now_s: float) -> float:
        """Return the rate at a moment."""
        return self._rate * exp((self._at_s - now_s) / FADES_S)

    def restore(self, rate: float, now_s: float) -> None:
        """Make this the rate at a moment: for decisions made again."""
        self._rate, self._at_s = rate, now_s
