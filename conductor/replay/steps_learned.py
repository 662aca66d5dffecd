"""Correction of the seconds that a simulated engine predicts, from steps that are taken at once."""

from __future__ import annotations

from base.step_cost import OBSERVED_STEPS, StepCorrection

SegmentSeconds = tuple[bool, float, float]
"""Steps that go alike: whether they have chunks, and the seconds of the first, as an engine predicts them.
Last those that each takes more, which no engine foresees."""


class StepsLearned:
    """Learns of each segment, as `engine/scheduler.py` does of its steps."""

    def __init__(self, is_asked: bool) -> None:
        """Begin. `is_asked`: whether budgets ask for it; else nothing is learned."""
        self.segment: SegmentSeconds = (False, 0.0, 0.0)
        """The present one."""
        self._is_asked = is_asked
        self._correction = StepCorrection()
        self._num_steps = self._num_of_segment = 0

    def ratio(self, has_chunks: bool) -> float:
        """Return what to multiply a prediction with."""
        return self._correction.ratio(has_chunks)

    def planned_after_s(self, more_s: float) -> float:
        """Return when the step after one is planned which is `more_s` longer than the segment's first."""
        has_chunks, expected_s, _ = self.segment
        return self._correction.planned_after_s(has_chunks, expected_s + more_s)

    def begins(self, has_chunks: bool, expected_s: float, beside_s: float) -> None:
        """Begin with the next segment."""
        self.segment = has_chunks, expected_s, beside_s
        self._num_of_segment = 0

    def until(self, steps: int) -> None:
        """Learn from so many steps of the present segment, those included that were learned from before."""
        self.observe(steps - self._num_of_segment, self.segment)
        self._num_of_segment = steps

    def observe(self, steps: int, segment: SegmentSeconds) -> None:
        """Learn from so many steps more of a segment."""
        if not self._is_asked:
            return
        has_chunks, expected_s, beside_s = segment
        before, self._num_steps = self._num_steps, self._num_steps + steps
        observed = steps if has_chunks else self._num_steps // OBSERVED_STEPS - before // OBSERVED_STEPS
        if observed > 0:
            self._correction.observe(has_chunks, expected_s, expected_s + beside_s, observed)
