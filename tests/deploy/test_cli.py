import subprocess
import sys

import pytest

from deploy import cli
from tests.deploy.processes import ROOT, marked_environment

SLOW_TO_IMPORT = {"torch", "ray", "transformers", "fastapi", "pydantic", "yaml", "grpc"}


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=marked_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_imports_nothing_slow():
    code = f"""
import sys
from deploy.cli import main
try:
    main(["--help"])
except SystemExit:
    print("slow:", {SLOW_TO_IMPORT} & set(sys.modules))
"""
    done = run(code)
    assert "slow: set()" in done.stdout, done.stdout + done.stderr
    for name in cli.COMMANDS:
        assert name in done.stdout


def test_a_standard_output_that_is_closed_leads_nowhere():
    code = """
import os, sys
from deploy.cli import main
os.close(1)
sys.stdout = None  # as Python itself has it after `>&-`
try:
    main(["--version"])
except SystemExit:
    print(os.readlink("/proc/self/fd/1"), sys.stdout.fileno(), file=sys.stderr)
"""
    assert run(code).stderr == "/dev/null 1\n"


def test_a_mistyped_command_is_answered_with_the_nearest():
    done = run("from deploy.cli import main; main(['statsu'])")
    assert done.returncode == 2
    assert "status" in done.stderr


def test_a_command_that_parses_its_own_arguments_gets_them_all(monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, "own", ("tests.deploy.test_cli:own_parser", "Parses itself."))
    with pytest.raises(SystemExit) as caught:
        cli.main(["own", "trace.jsonl", "--nodes", "8P8D", "--help"])
    assert caught.value.code == 7
    assert capsys.readouterr().out == "trace.jsonl --nodes 8P8D --help\n"


def own_parser(argv: list[str]) -> int:
    print(*argv)
    return 7


def test_every_command_of_the_table_is_there_and_its_help_imports_neither_torch_nor_transformers():
    code = """
import sys
from deploy.cli import COMMANDS, main
for name in sorted(COMMANDS, key="up".__eq__):
    try:
        main([name, "--help"])
    except SystemExit as ended:
        print(f"{name}: status: {ended.code} slow: {({'torch', 'transformers', 'ray'} & set(sys.modules))}")
"""
    done = run(code)
    for name in cli.COMMANDS:
        slow = {"ray"} if name == "up" else set()
        assert f"\n{name}: status: 0 slow: {slow}\n" in done.stdout, done.stdout + done.stderr


def test_a_wrong_configuration_ends_up_with_status_2(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("modle: x\n")
    done = run(f"from deploy.cli import main; main(['up', '-c', {str(path)!r}])")
    assert done.returncode == 2
    assert done.stderr == f"{path}:1: modle: unknown key; did you mean model?\n"
    assert done.stdout == ""
