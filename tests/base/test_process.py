import json
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
    return lambda: print("ran", sys.stdin.read())

sys.exit(run_process("program", Config, lambda config: "program", prepare))
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
