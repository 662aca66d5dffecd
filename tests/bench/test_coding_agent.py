"""What is made of an agent's own account of its session."""

import json
import re

from bench.coding_agent import COMMANDS, call_form, summary, worked


def call(command, status="completed", session="s"):
    state = {"status": status, "input": {"command": command}, "output": "out", "metadata": {"exit": 0}}
    tokens = {"input": 10, "output": 5, "cache": {"read": 30}}
    return [
        {"type": "tool_use", "sessionID": session, "part": {"tool": "bash", "state": state}},
        {"type": "step_finish", "sessionID": session, "part": {"reason": "tool-calls", "tokens": tokens}},
    ]


def test_turns_are_counted_to_as_many_as_are_wanted():
    turns = list(worked(iter([*call("ls"), *call("cat", "error"), *call("ls"), *call("never")]), 3))
    found = summary(turns)
    assert (found["turns"], found["turns_with_calls"], found["calls_carried_out"]) == (3, 3, 2)
    assert (found["different_commands"], found["sessions"], found["errors"]) == (2, 1, 0)
    assert found["cached_percent"] == 75.0


def test_an_error_is_a_turn_without_a_call():
    error = {"type": "error", "sessionID": "s", "error": {"name": "UnknownError"}}
    found = summary(list(worked(iter([error]), 2)))
    assert (found["turns_with_calls"], found["errors"]) == (0, 1)


def test_each_command_is_a_call_of_the_form():
    for command in COMMANDS:
        arguments = json.dumps({"command": command, "description": "Look around"})
        text = f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'
        assert re.fullmatch(call_form(), text)
