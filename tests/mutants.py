"""Mutation testing: which small changes of the code would no fast test notice?

    python -m tests.mutants [NAME...] [--json FILE]

Each mutant is one change of one module (an operator, a condition, a number, a statement left out),
compiled from its changed syntax tree, and tested in a process forked from one that has imported what
takes long. It is killed if a test fails, or does not end. `check` and what says what an object is
(`__repr__`) are left as they are: those are the tests' own. mutmut was weighed: it copies the tree and
begins a new interpreter, with torch, for each mutant.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 40.0
LEFT_ALONE = {"check", "check_invariant", "__repr__"}

TARGETS = {
    "pool": ("engine.block_pool", ("tests/engine/test_block_pool.py", "tests/engine/test_scheduler.py")),
    "lease": ("transfer.owned.grant", ("tests/transfer/owned/test_grant.py",)),
    "reservation": ("decode_node.reservation", ("tests/decode_node/test_role.py",)),
    "admission": ("conductor.placing.admission", ("tests/conductor/placing/test_admission.py",)),
}
"""A module, and the tests that are to notice."""

SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub,
    ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.And: ast.Or, ast.Or: ast.And, ast.Break: ast.Continue,
    ast.Continue: ast.Break,
}  # fmt: skip


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield each node that can be changed, and how; in an order that a copy of the tree has too."""

    def visit(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
        if isinstance(node, ast.Assert) or getattr(node, "name", None) in LEFT_ALONE:
            return
        if isinstance(node, ast.Compare) or (
            isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPPED
        ):
            yield node, "operator"
        elif isinstance(node, ast.Break | ast.Continue):
            yield node, "jump"
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node, "condition"
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            yield node, "number"
        if isinstance(node, ast.Raise | ast.Delete | ast.AugAssign) or _is_effect(node):
            yield node, "left out"
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list", "type_comment", "bases"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from visit(child)

    return visit(tree)


def _is_effect(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await)
    return isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple)


def mutant(tree: ast.Module, number: int) -> tuple[ast.Module, str]:
    """Return a copy of `tree` with its change `number`, and what that is."""
    changed = copy.deepcopy(tree)
    node, how = list(places(changed))[number]
    line, before = getattr(node, "lineno", 0), _shown(node)
    _change(node, how)
    after = "nothing" if how == "left out" else _shown(node)
    if how == "left out":
        _leave_out(changed, node)
    return ast.fix_missing_locations(changed), f"{line}: {before}  ->  {after}"


def _shown(node: ast.AST) -> str:
    shown = ast.unparse(node.test if isinstance(node, ast.If | ast.While) else node)
    return shown.splitlines()[0]


def _change(node: ast.AST, how: str) -> None:
    if how == "operator" and isinstance(node, ast.Compare):
        node.ops[0] = SWAPPED[type(node.ops[0])]()
    elif how == "operator" and isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        node.op = SWAPPED[type(node.op)]()
    elif how == "condition" and isinstance(node, ast.If | ast.IfExp | ast.While):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif how == "number" and isinstance(node, ast.Constant):
        node.value = (not node.value) if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
    elif how == "jump":
        node.__class__ = SWAPPED[type(node)]  # both are empty


def _leave_out(tree: ast.Module, node: ast.AST) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if isinstance(value, list) and any(child is node for child in value):
                setattr(parent, name, [ast.Pass() if child is node else child for child in value])


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Has one module imported from a changed tree."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self._name, self._path, self._tree = name, path, tree

    def find_spec(
        self, fullname: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=str(self._path))

    def exec_module(self, module: object) -> None:
        code = compile(self._tree, str(self._path), "exec")
        exec(code, module.__dict__)


def tested(name: str, path: Path, tree: ast.Module, tests: tuple[str, ...]) -> bool:
    """Return whether the tests pass with `tree` for the module `name`; what does not end does not."""
    pid = os.fork()
    if not pid:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.setsid()
        sys.meta_path.insert(0, Changed(name, path, tree))
        try:
            status = pytest.main(["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", *tests])
        except BaseException:
            status = 1
        os._exit(int(status))
    with open(os.pidfd_open(pid)) as ended:
        if not select.select([ended], [], [], TIMEOUT_S)[0]:
            os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def measured(name: str, tests: tuple[str, ...]) -> dict[str, object]:
    """Return how many mutants of a module its tests kill, and those that they do not."""
    path = ROOT / f"{name.replace('.', '/')}.py"
    tree = ast.parse(path.read_text())
    if not tested(name, path, tree, tests):
        raise SystemExit(f"{name}: its tests fail as it is")
    begin_s, survivors, count = time.monotonic(), [], len(list(places(tree)))
    for number in range(count):
        changed, what = mutant(tree, number)
        if tested(name, path, changed, tests):
            survivors.append(what)
            print(f"{path.relative_to(ROOT)}:{what}", flush=True)
    killed = count - len(survivors)
    took_s = round(time.monotonic() - begin_s)
    print(f"{name}: {killed} of {count} killed, {killed / count:.1%}, {took_s} s", flush=True)
    return {"mutants": count, "killed": killed, "took_s": took_s, "survivors": survivors}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*TARGETS, []], help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.chdir(ROOT)
    for name in arguments.names or TARGETS:
        row = measured(*TARGETS[name])
        if arguments.json:
            table = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
            arguments.json.write_text(json.dumps(table | {name: row}, indent=1) + "\n")


if __name__ == "__main__":
    # What every test imports and no mutant is of.
    import hypothesis
    import numpy
    import torch

    assert hypothesis
    assert numpy
    assert torch
    main()
