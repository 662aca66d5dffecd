"""Work that a node could do by its profile, counted as time passes and sequences come and go."""

from __future__ import annotations


class PassedTime:
    """Steps, and seconds that prompts had, on one node by the profile."""

    __slots__ = ("_at_s", "_prompt_s", "_share", "_step_s", "_steps")

    def __init__(self, now_s: float) -> None:
        self._at_s = now_s
        self._steps = self._prompt_s = self._step_s = 0.0
        self._share = 1.0

    def change(self, now_s: float, step_s: float, share: float) -> None:
        """Count until now, and from now on with other steps; no effect at a moment before the last change.

        Args:
            step_s: Seconds of a step by the profile; 0: nobody decodes.
            share: Of the node's time, for prompts.
        """
        passed_s = now_s - self._at_s
        if passed_s < 0:
            return
        if self._step_s:
            self._steps += passed_s / self._step_s
        self._prompt_s += passed_s * self._share
        self._at_s, self._step_s, self._share = now_s, step_s, share

    def steps_at(self, now_s: float) -> float:
        """Return the number of steps until a moment, of all time."""
        return self._steps + ((now_s - self._at_s) / self._step_s if self._step_s else 0.0)

    def prompt_s_at(self, now_s: float) -> float:
        """Return the seconds that prompts had until a moment, of all time."""
        return self._prompt_s + (now_s - self._at_s) * self._share
