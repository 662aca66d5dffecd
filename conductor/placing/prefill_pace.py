"""How fast prefill nodes really are, against the profile, from when their prompts were done.

The seconds of a prompt that is alone on its node are its own. A node with several computes parts of them
in the same step, so that each one's seconds hold the others': a short prompt beside a long
one seems to take as long. Then a run of prompts is taken together: from the moment the node
began on them, or finished those before, to the last first token.

Where sequences decode beside them, only the seconds that prompts had count (`passed_time.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from base.request import NodeId

# A node that is never idle is measured this often.
RUN_LENGTH = 8


@dataclass(slots=True)
class _PromptRun:
    prompt_s_before: float
    num_placed: int = 0
    num_done: int = 0
    done_profile_s: float = 0.0
    was_alone: bool = True
    is_spoiled: bool = False


class PrefillPace:
    """The run of prompts that each node is at."""

    def __init__(self) -> None:
        self._runs: dict[NodeId, _PromptRun] = {}

    def placed(self, node_id: NodeId, prompt_s: float) -> None:
        """A prompt was placed on a node; `prompt_s`: the seconds that prompts have had there so far."""
        run = self._runs.get(node_id)
        if run is None:
            run = self._runs[node_id] = _PromptRun(prompt_s)
        run.num_placed += 1
        run.was_alone = run.was_alone and run.num_placed == 1

    def done(
        self, node_id: NodeId, prompt_s: float, profile_s: float, compute_s: float
    ) -> tuple[float, float, int] | None:
        """A prompt that was placed is done; return (profile's seconds, measured, prompts) if a run is over.

        Args:
            prompt_s: As in `placed`.
            profile_s: This prompt's, by the profile.
            compute_s: This prompt's, by the node.
        """
        run = self._runs[node_id]
        run.num_placed -= 1
        run.num_done += 1
        run.done_profile_s += profile_s
        if run.num_placed and run.num_done < RUN_LENGTH:
            return None
        self._end(node_id, run, prompt_s)
        if run.is_spoiled:
            return None
        if run.was_alone:
            return profile_s, compute_s, 1
        return run.done_profile_s, prompt_s - run.prompt_s_before, run.num_done

    def lost(self, node_id: NodeId, prompt_s: float) -> None:
        """A prompt that was placed will not be done: what the node did of it is not known."""
        run = self._runs[node_id]
        run.num_placed -= 1
        run.is_spoiled = True
        if not run.num_placed:
            self._end(node_id, run, prompt_s)

    def _end(self, node_id: NodeId, run: _PromptRun, prompt_s: float) -> None:
        del self._runs[node_id]
        if run.num_placed:
            self._runs[node_id] = _PromptRun(prompt_s, run.num_placed, was_alone=False)
