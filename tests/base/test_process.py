import json
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import sys
from dataclasses import dataclass
from base.process import run_process

@dataclass(frozen=True, slots=True)
class Config:
    word: str

def prepare(config):
    print("prepared", config.word, flush=True)
    return lambda lifetime: print("ran", sys.stdin.read())

sys.exit(run_process("program", Config, lambda config: "program", prepare))
"""


LIMIT = """
import resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
"""


def said(folder, told):
    (folder / "c.json").write_text(json.dumps({"word": "so"}))
    command = [sys.executable, "-c", PROGRAM, "--config", str(folder / "c.json"), "--spare"]
    done = subprocess.run(command, input=told, capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout.splitlines()


def test_a_spare_prepares_and_runs_when_it_is_told_to(tmp_path):
    assert said(tmp_path, "\nrest") == ["prepared so", "ran rest"]


def test_a_spare_whose_supervisor_is_gone_does_not_run(tmp_path):
    assert said(tmp_path, "") == ["prepared so"]


def test_a_log_ends_with_what_the_process_says(tmp_path):
    # A library's own last words, which come after all that Python runs at its end.
    late = "import ctypes\nctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).malloc_stats)\n"
    program = late + PROGRAM.replace('print("prepared", config.word', 'print("last", file=sys.stderr')
    (tmp_path / "c.json").write_text(json.dumps({"word": "so"}))
    command = [sys.executable, "-c", program, "--config", str(tmp_path / "c.json")]
    done = subprocess.run(command, input="", capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr == "last\n"


def test_a_process_may_open_as_many_files_as_its_host_lets_it(tmp_path):
    program = PROGRAM.replace("config.word, flush", "resource.getrlimit(resource.RLIMIT_NOFILE), flush")
    (tmp_path / "c.json").write_text(json.dumps({"word": "so"}))
    command = [sys.executable, "-c", LIMIT + program, "--config", str(tmp_path / "c.json")]
    done = subprocess.run(command, input="", capture_output=True, text=True, cwd=ROOT, check=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert done.stdout.splitlines()[0] == f"prepared ({hard}, {hard})"
