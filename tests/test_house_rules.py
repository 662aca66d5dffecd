"""The rules of CONTRIBUTING.md that a program can check."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "base",
    "bench",
    "conductor",
    "decode_node",
    "deploy",
    "engine",
    "kvstore",
    "node",
    "prefill_node",
    "transfer",
)
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
# a kernel that is split up moves its registers through memory
FUSED_KERNELS = {"_decode_part", "_decode_groups", "_prefill_tile"}
BANNED_FILE_NAMES = {"utils", "helpers", "common", "misc", "manager", "types"}
CLOCK_CALLS = {"time.time", "time.monotonic", "time.perf_counter", "time.sleep"}
# bench measures, so it reads clocks; base/clock.py is the door for everybody else
CLOCK_DOORS = ("base/clock.py", "bench/")


def source_files() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield file.relative_to(ROOT).as_posix(), file.read_text()


@functools.cache
def tree_of(text: str) -> ast.Module:
    return ast.parse(text)


def test_files_are_short() -> None:
    long = {name: text.count("\n") for name, text in source_files() if text.count("\n") > MAX_FILE_LINES}
    assert not long, f"over {MAX_FILE_LINES} lines: {long}"


def test_functions_are_short() -> None:
    long = []
    for name, text in source_files():
        for node in ast.walk(tree_of(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > MAX_FUNCTION_LINES and node.name not in FUSED_KERNELS:
                    long.append(f"{name}:{node.lineno} {node.name} ({size})")
    assert not long, f"over {MAX_FUNCTION_LINES} lines: {long}"


def test_files_have_names_that_say_something() -> None:
    assert not [name for name, _ in source_files() if Path(name).stem in BANNED_FILE_NAMES]


def test_every_file_says_what_it_owns() -> None:
    silent = [name for name, text in source_files() if not ast.get_docstring(tree_of(text))]
    assert not silent, f"no docstring at the head of {silent}"


def test_time_comes_from_a_clock() -> None:
    for name, text in source_files():
        if not name.startswith(CLOCK_DOORS):
            used = {call for call in CLOCK_CALLS if re.search(rf"\b{re.escape(call)}\(", text)}
            assert not used, f"{name} calls {used}; take a Clock"


@pytest.mark.parametrize("word", [r"\bTODO\b", r"\bFIXME\b", r"\bXXX\b", r"\bHACK\b"])
def test_nothing_is_left_for_later(word: str) -> None:
    assert not [name for name, text in source_files() if re.search(word, text)]


def test_no_version_suffixes_in_names() -> None:
    pattern = re.compile(r"(_v2|_V2|^new_|^legacy_|^old_)")
    for name, text in source_files():
        for node in ast.walk(tree_of(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                assert not pattern.search(node.name), f"{name}:{node.lineno} {node.name}"


def test_broad_except_stands_only_at_the_borders() -> None:
    borders = {"base/rpc.py", "base/request_tasks.py", "engine/loop.py", "conductor/api/http_api.py"}
    for name, text in source_files():
        for node in ast.walk(tree_of(text)):
            if isinstance(node, ast.ExceptHandler) and name not in borders:
                broad = node.type is None or (isinstance(node.type, ast.Name) and node.type.id == "Exception")
                assert not broad, f"{name}:{node.lineno} catches everything"


# Wrappers by nature, and of what.
WRAPPERS = {"FaultyTransport": "the transport of a test, which is to fail where bytes are moved"}


def forwards(member: ast.stmt) -> bool:
    """Return whether a method does nothing but call, or a property but read, its namesake on an attribute."""
    if not isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    body = member.body[1:] if ast.get_docstring(member) else member.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    value = body[0].value
    if isinstance(member, ast.AsyncFunctionDef):
        if not isinstance(value, ast.Await):
            return False  # it makes a function a coroutine, which its callers need
        value = value.value
    is_property = any(ast.unparse(each) == "property" for each in member.decorator_list)
    called = value if is_property else getattr(value, "func", None)
    if not isinstance(called, ast.Attribute) or called.attr != member.name:
        return False
    return isinstance(called.value, ast.Attribute) and ast.unparse(called.value.value) == "self"


def forwarding_wrappers(text: str) -> set[str]:
    """Return the classes of which more than half of the public members, and two at least, only forward."""
    found = set()
    for node in ast.walk(tree_of(text)):
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            public = [each for each in methods if not each.name.startswith("_")]
            num_forwarding = sum(map(forwards, public))
            if num_forwarding > max(1, len(public) / 2):
                found.add(node.name)
    return found


def test_no_class_mostly_forwards() -> None:
    """Whoever wants to know what happens is an observer, notified where it happens."""
    found = set().union(*(forwarding_wrappers(text) for _, text in source_files()))
    assert not found - set(WRAPPERS)


TRACED_STORE = """
class TracedStore:
    @property
    def size(self):
        return self._inner.size

    async def load(self, chain):
        \"\"\"Load.\"\"\"
        return await self._inner.load(chain)

    def close(self):
        self._inner.close()

    def save(self, chain):
        self._spans.begin(chain)
        self._inner.save(chain)
"""


def test_a_class_that_mostly_forwards_is_found() -> None:
    assert forwarding_wrappers(TRACED_STORE) == {"TracedStore"}
    assert not forwarding_wrappers(TRACED_STORE.replace("self._inner.close()", "self._end(self._inner)"))
    assert not forwarding_wrappers(TRACED_STORE.replace("return await", "return"))


def asserts(test: ast.AST) -> bool:
    """Return whether a test itself says what must be: an assert, `pytest.raises`, a helper named so."""
    for node in ast.walk(test):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "pytest.raises" or re.match("check|expect|assert", called.rpartition(".")[2]):
                return True
    return False


def test_every_test_asserts() -> None:
    silent, num_tests = [], 0
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(tree_of(file.read_text())):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and node.name.startswith("test_"):
                num_tests += 1
                silent += [] if asserts(node) else [f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"]
    assert num_tests > 1_000
    assert not silent, f"these cannot fail by what they say: {silent}"


# Their clocks are virtual: to sleep there is to say what time it is.
VIRTUAL_CLOCKS = {
    "tests/base/test_attach.py",
    "tests/conductor/serving/test_overload.py",
    "tests/conductor/serving/test_role_changes.py",
    "tests/conductor/replay/test_conformance.py",
    "tests/conductor/replay/test_several_conductors.py",
    "tests/simulation/carriage.py",
    "tests/simulation/conductor.py",
    "tests/simulation/world.py",
}


def test_no_test_sleeps_in_order_to_wait() -> None:
    for file in sorted((ROOT / "tests").rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        for node in ast.walk(tree_of(file.read_text())):
            if isinstance(node, ast.Call) and name not in VIRTUAL_CLOCKS:
                is_sleep = ast.unparse(node.func) in ("asyncio.sleep", "sleep", "time.sleep")
                assert not is_sleep or ast.unparse(node.args[0]) == "0", (
                    f"{name}:{node.lineno} waits by sleeping"
                )


# Commands, which no test imports: they may say how long they took, and end after so many seconds.
TEST_COMMANDS = {"tests/fuzz/__main__.py", "tests/mutants.py", "tests/simulation/__main__.py"}
CLOCKS = {
    "asyncio.get_running_loop().time",
    "resource.getrusage",
    "datetime.now",
    "datetime.datetime.now",
    "os.times",
    *(
        f"time.{name}{unit}"
        for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
        for unit in ("", "_ns")
    ),
    "SystemClock().now_s",
}


def test_no_test_reads_a_clock() -> None:
    """A bound on a clock fails whenever the machine is busy: count what is done, or take a virtual clock."""
    read = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        for node in ast.walk(tree_of(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                read.append(f"{name}:{node.lineno} imports from time, where this rule does not look")
            elif isinstance(node, ast.Attribute) and name not in TEST_COMMANDS | VIRTUAL_CLOCKS:
                read += [f"{name}:{node.lineno} {ast.unparse(node)}"] * (ast.unparse(node) in CLOCKS)
    assert not read, f"read a clock: {read}"


PATIENCE_S = 60.0
# What fails when it does *not* end so soon, or is the client's own wish: no machine is too slow for these.
SHORT_WAITS = {
    "tests/cluster/asking.py": "the pause between two looks",
    "tests/cluster/test_leaving.py": "a client's deadline, which must pass",
    "tests/cluster/test_prometheus.py": "the pause between two looks",
    "tests/conductor/api/test_disconnect.py": "a client's deadline, which must pass",
    "tests/node/test_remote_shard.py": "a number of layers",
    "tests/transfer/owned/test_board.py": "what must not have come meanwhile",
    "tests/transfer/rdma/test_holds.py": "what must not have come meanwhile",
}
WAITS = {"timeout": 1, "wait": 1, "wait_for": 2, "join": 1, "settimeout": 1}
"""By name, the place of the limit among the arguments, if it is the last of them."""


def waits_s(call: ast.Call) -> list[float]:
    """Return the limits in seconds, written as numbers, of a call that waits."""
    limits = [each.value for each in call.keywords if each.arg == "timeout"]
    if len(call.args) == WAITS.get(ast.unparse(call.func).rpartition(".")[2]):
        limits.append(call.args[-1])
    return [float(each.value) for each in limits if isinstance(each, ast.Constant) and _is_number(each.value)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def test_every_wait_of_a_test_is_patient() -> None:
    """A bound that is passed only by what is broken costs nothing; a short one fails on a busy machine."""
    for file in sorted((ROOT / "tests").rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        if name not in VIRTUAL_CLOCKS and name not in SHORT_WAITS:
            for node in ast.walk(tree_of(file.read_text())):
                if isinstance(node, ast.Call):
                    assert all(limit_s >= PATIENCE_S for limit_s in waits_s(node)), (
                        f"{name}:{node.lineno} waits for less than {PATIENCE_S} s"
                    )
