"""The table of model families, and which a model is of: what its chat template writes shows it."""

from __future__ import annotations

from collections.abc import Mapping

from conductor.api.parsing import harmony as gpt_oss
from conductor.api.parsing.answer import Form
from conductor.api.parsing.gemma_calls import gemma
from conductor.api.parsing.json_calls import (
    DEEPSEEK_MARKS,
    KIMI_MARKS,
    bare_objects,
    deepseek,
    kimi,
    mistral,
    tagged_object,
)
from conductor.api.parsing.pythonic_calls import pythonic
from conductor.api.parsing.tag_calls import dsml, glm, qwen_function, qwen_open_function, xtml_call

_THINK = ("<think>", "</think>")
_STOP = "\n</think>\n\n"
_DSML = ("｜DSML｜",)
_XTML_PARTS = ("response", "tools", "message")

FORMS: Mapping[str, Form] = {
    "hermes": Form({"<tool_call>": tagged_object}, _THINK, inner=("</tool_call>",), stop_thinking=_STOP),
    "qwen-xml": Form(
        {"<tool_call>": qwen_function, "<function=": qwen_open_function},
        _THINK,
        ends_thinking=("<tool_call>", "<function="),
        inner=("</tool_call>", "</function>", "<parameter=", "</parameter>"),
        stop_thinking=_STOP,
    ),
    "llama3": Form({"<|python_tag|>": bare_objects}, bare=("{", bare_objects), keeps_space=True),
    "llama4": Form({"<|python_start|>": pythonic}, bare=("[", pythonic), dropped=("<|python_end|>",)),
    "mistral": Form(
        {"[TOOL_CALLS]": mistral},
        ("[THINK]", "[/THINK]"),
        inner=("[ARGS]", "[CALL_ID]"),
        stop_thinking="[/THINK]",
    ),
    "mistral-think-text": Form(
        {"[TOOL_CALLS]": mistral}, _THINK, inner=("[ARGS]", "[CALL_ID]"), stop_thinking=_STOP
    ),
    "deepseek-v3": Form(
        {"<｜tool▁calls▁begin｜>": deepseek}, _THINK, inner=DEEPSEEK_MARKS, stop_thinking="\n</think>"
    ),
    "deepseek-v3.2": Form(
        {"<｜DSML｜function_calls>": dsml("function_calls", "")},
        _THINK,
        inner=_DSML,
        stop_thinking="</think>",
    ),
    "deepseek-v4": Form(
        {"<｜DSML｜tool_calls>": dsml("tool_calls", "")}, _THINK, inner=_DSML, stop_thinking="</think>"
    ),
    "deepseek-v4.1": Form(
        {"<｜DSML｜ calls>": dsml("calls", " ")}, _THINK, inner=_DSML, stop_thinking="</think>"
    ),
    "gemma": Form(
        {"<|tool_call>": gemma},
        ("<|channel>thought", "<channel|>"),
        inner=("<tool_call|>", '<|"|>'),
        stop_thinking="\n<channel|>",
    ),
    "gpt-oss": Form(
        {},
        inner=gpt_oss.MARKS,
        run=gpt_oss.harmony,
        stop_thinking="<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    "glm": Form(
        {"<tool_call>": glm},
        _THINK,
        inner=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        stop_thinking="</think>",
    ),
    "kimi-k2": Form(
        {"<|tool_calls_section_begin|>": kimi},
        _THINK,
        ends_thinking=("<|tool_calls_section_begin|>",),
        inner=KIMI_MARKS,
        stop_thinking="</think>",
        keeps_space=True,
    ),
    "kimi-k3": Form(
        {"<|open|>call": xtml_call},
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        ends_thinking=("<|open|>response<|sep|>", "<|open|>tools<|sep|>"),
        dropped=tuple(f"<|{side}|>{part}<|sep|>" for part in _XTML_PARTS for side in ("open", "close")),
        stop_thinking="<|close|>think<|sep|><|open|>response<|sep|>",
    ),
}

_SIGNS: tuple[tuple[str, str], ...] = (
    ("<|channel|>analysis", "gpt-oss"),
    ("<|open|>", "kimi-k3"),
    ("<|tool_calls_section_begin|>", "kimi-k2"),
    ("<｜DSML｜ calls>", "deepseek-v4.1"),
    ("<｜DSML｜tool_calls>", "deepseek-v4"),
    ("<｜DSML｜function_calls>", "deepseek-v3.2"),
    ("<｜tool▁calls▁begin｜>", "deepseek-v3"),
    ("<|tool_call>", "gemma"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen-xml"),
    ("<tool_call>", "hermes"),
    ("[THINK]", "mistral"),
    ("<|header_start|>", "llama4"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": dictionary of argument name and its value', "llama3"),
    ("</think>", "hermes"),
)
"""Texts in the chat templates of each family; the first that is found decides."""


def family_of(template: str) -> str:
    """Return the family of a model by its chat template; empty: none that is known."""
    if "[TOOL_CALLS]" in template:
        return "mistral-think-text" if "<think>" in template else "mistral"
    return next((family for sign, family in _SIGNS if sign in template), "")
