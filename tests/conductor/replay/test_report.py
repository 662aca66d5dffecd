"""Reports: how far a profile's evidence reaches, and what is said of a trace that goes beyond."""

import dataclasses

import pytest

from conductor.placing.profile import Evidence
from conductor.profiles.reader import load_profile, preset_names
from conductor.replay.report import reach_note, reach_tokens
from conductor.replay.trace import Trace, TraceRequest


def asking(*lengths: int) -> Trace:
    """A trace of prompts of such lengths."""
    rows = [
        TraceRequest(float(at), tokens, 10, range(-(-tokens // 512))) for at, tokens in enumerate(lengths)
    ]
    return Trace("lengths", 512, rows)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_says_how_far_it_was_fitted_and_how_it_reaches_contexts_of_200k(name: str) -> None:
    profile = load_profile(name)
    reach = reach_tokens(profile)
    assert 1_000 <= reach < 200_000
    assert reach_note(asking(500), profile) == ""
    note = reach_note(asking(500, 200_000), profile)
    assert f"fitted to contexts of {reach:,} tokens: 50% of the prompts are longer, up to 200,010" in note


def test_a_profile_of_which_nothing_is_recorded_says_nothing() -> None:
    profile = dataclasses.replace(load_profile("h200-llama8b"), evidence=Evidence(), fitted_tokens=0)
    assert reach_note(asking(200_000), profile) == ""
