"""The tool of `conductor chat --calculator`: arithmetic, and nothing else of Python."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping
from typing import Any

MAX_CHARS = 200
MAX_POWER = 1_000

TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an arithmetic expression, such as 3 * (4 + 5).",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Numbers and + - * / // % ** ( )",
                    "pattern": r"^[-(]*[0-9][.0-9]*( [-+*/%]{1,2} [-(]*[0-9][.0-9]*[)]*){1,20}$",
                }
            },
            "required": ["expression"],
        },
    },
}

_TWO: Mapping[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def result_of(arguments: str) -> str:
    """Return the result of a call by the JSON of its arguments; an error in words where there is none."""
    try:
        expression = json.loads(arguments)["expression"]
        if not isinstance(expression, str) or len(expression) > MAX_CHARS:
            return f"error: expression: a text of at most {MAX_CHARS} characters is wanted"
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (
        ValueError,
        KeyError,
        TypeError,
        SyntaxError,
        ArithmeticError,
        RecursionError,
        MemoryError,
    ) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, power = _value(left), _value(right)
            if abs(base) > MAX_POWER or abs(power) > MAX_POWER:
                raise ValueError("a power that is too great")
            found: float = base**power
            return found
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _TWO:
            return _TWO[type(op)](_value(left), _value(right))
    raise ValueError("no arithmetic")
