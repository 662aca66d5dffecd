"""Calls whose arguments stand between tags: the forms of Qwen Coder, GLM, DeepSeek V3.2 and Kimi K3.

A value is plain text and may hold the tags themselves, so where it ends is decided by what stands around it:
a block is taken whole first, and its arguments are found in it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

from conductor.api.parsing.coerce import typed
from conductor.api.parsing.events import Called, Emit, Schemas, called_or_none, handed, value_or_none
from conductor.api.parsing.feed import Feed, Marks, Steps


def _typed_call(name: str, given: Iterable[tuple[str, str]], schemas: Schemas) -> Called | None:
    found = schemas.get(name, {}).get("properties")
    properties = found if isinstance(found, dict) else {}
    return called_or_none(name, {key: typed(value, properties.get(key)) for key, value in given})


_QWEN_VALUE = re.compile(
    r"<parameter=([^>\n]{0,200})>\n?"
    r"(.*?)"
    r"(?:\n?</parameter>(?=\s*(?:<parameter=|</function>\s*(?:</tool_call>|\Z)|\Z))"
    r"|\n(?=<parameter=[^>\n]{0,200}>\n)"
    r"|\n?(?=</function>\s*\Z))",
    re.DOTALL,
)


def qwen_function(feed: Feed, schemas: Schemas, emit: Emit) -> Steps[str | None]:
    """Read `<function=NAME> <parameter=KEY> VALUE </parameter> ... </function></tool_call>`."""
    space = yield from feed.space()
    if not (yield from feed.begins("<function=")):
        return (yield from feed.no_call(space, "</tool_call>"))
    broken = yield from qwen_open_function(feed, schemas, emit)
    return None if broken is None else f"{space}<function={broken}"


def qwen_open_function(feed: Feed, schemas: Schemas, emit: Emit) -> Steps[str | None]:
    """Read the same after `<function=`."""
    block = yield from feed.block("</tool_call>", lambda text: text.rstrip().endswith("</function>"))
    end = "</tool_call>"
    if block is None:
        # The answer ended; a function that did too is whole, unless that was chance.
        if feed.is_cut or not feed.text.rstrip().endswith("</function>"):
            return ""
        block, end = feed.take(len(feed.text)), ""
    name, bracket, body = block.partition(">")
    given = [(match[1].strip(), match[2]) for match in _QWEN_VALUE.finditer(body)] if bracket else []
    call = _typed_call(name.strip(), given, schemas) if bracket else None
    return handed(call, emit, block + end)


_GLM_VALUE = re.compile(
    r"<arg_key>(.{0,200}?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>(?=\s*(?:<arg_key>|\Z))|\Z)", re.DOTALL
)


def glm(feed: Feed, schemas: Schemas, emit: Emit) -> Steps[str | None]:
    """Read `NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ... </tool_call>`."""
    block = yield from feed.block(
        "</tool_call>", lambda text: "<arg_value>" not in text or text.rstrip().endswith("</arg_value>")
    )
    rest = ""
    if block is None:
        # A value that is not closed, but the call is: all that could follow was waited for.
        block, end, rest = feed.text.partition("</tool_call>")
        if feed.is_cut or not end:
            return ""
        feed.text = rest
    name, found, pairs = block.partition("<arg_key>")
    call = _typed_call(name.strip(), _GLM_VALUE.findall(found + pairs), schemas)
    return handed(call, emit, f"{block}</tool_call>")


_DSML = "｜DSML｜"
_BRACKET = Marks(">")


def dsml(section: str, space: str) -> Any:
    """Return the reader of a section of DeepSeek's later form; `space` stands between mark and word."""
    mark = f"{_DSML}{space}"
    end = f"</{mark}{section}>"
    invoke, invoke_end = f"<{mark}invoke name=", f"</{mark}invoke>"
    value = re.compile(
        rf'<{mark}parameter name="([^"\n]{{0,200}})" string="(true|false)">(.*?)</{mark}parameter>'
        rf"(?=\s*(?:<{mark}parameter name=|\Z))",
        re.DOTALL,
    )

    def is_whole(text: str) -> bool:
        return f"<{mark}parameter name=" not in text or text.rstrip().endswith(f"</{mark}parameter>")

    def read(feed: Feed, schemas: Schemas, emit: Emit) -> Steps[str | None]:
        while True:
            blank = yield from feed.space()
            found = yield from feed.begins(invoke, end)
            if found == end:
                return None
            if not found:
                return (yield from feed.no_call(blank, end))
            head, bracket = yield from feed.text_until(_BRACKET)
            name = head.strip()
            block: str | None = ""
            if not name.endswith("/"):
                block = yield from feed.block(invoke_end, is_whole)
            if block is None or not bracket:
                return ""
            given = {
                key: text if is_text == "true" else _json_or_text(text)
                for key, is_text, text in value.findall(block)
            }
            call = called_or_none(name.removesuffix("/").strip().strip('"'), given)
            if call is None:
                return f"{found}{name}>{block}{invoke_end}"
            emit(call)

    return read


def _json_or_text(text: str) -> Any:
    value = value_or_none(text)
    return text if value is None and text.strip() != "null" else value


_XTML_VALUE = re.compile(
    r'<\|open\|>argument key="([^"\n]{0,200})" type="([a-z]{0,20})"<\|sep\|>(.*?)<\|close\|>argument<\|sep\|>'
    r"(?=<\|open\|>argument key=|\Z)",
    re.DOTALL,
)
_XTML_CALL = re.compile(r'call tool="([^"\n]{0,200})"')
_XTML_SEP = Marks("<|sep|>")


def xtml_call(feed: Feed, schemas: Schemas, emit: Emit) -> Steps[str | None]:
    """Read a call of Kimi K3 after its opening."""
    head, _ = yield from feed.text_until(_XTML_SEP)
    block = yield from feed.block(
        "<|close|>call<|sep|>",
        lambda text: "<|open|>argument" not in text or text.endswith("<|close|>argument<|sep|>"),
    )
    name = _XTML_CALL.match("call" + head)
    if block is None:
        return ""
    given = {
        html.unescape(key): text if kind == "string" else _json_or_text(text)
        for key, kind, text in _XTML_VALUE.findall(block)
    }
    call = called_or_none(html.unescape(name[1]), given) if name else None
    return handed(call, emit, head + block)
