"""Every `conductor ...` line of the documents is one that the command line takes, every file one it reads.

Those that need a cluster are run in test_docs_run.py, those of the replay in tests/replay.
"""

import re
import shlex

import pytest
import typer

from base.config import ClusterConfig
from deploy import cli
from deploy.config_file import read_cluster_config
from tests.deploy.processes import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINE = re.compile(r"^    (?:\.venv/bin/)?conductor ([a-z]\S*.*?)(?:\s+#.*)?$", re.MULTILINE)
COMMANDS = sorted({(path.name, line) for path in DOCUMENTS for line in LINE.findall(path.read_text())})


def test_there_are_commands_to_test():
    assert {line.split()[0] for _, line in COMMANDS} >= {
        "up",
        "status",
        "scale",
        "restart",
        "doctor",
        "replay",
    }


@pytest.mark.parametrize(("document", "line"), COMMANDS)
def test_the_command_line_takes(document, line, capsys):
    name, *arguments = shlex.split(line)
    assert name in cli.COMMANDS
    command = typer.main.get_command(cli.app(name)).commands[name]
    if command.add_help_option:
        command.make_context(name, arguments)  # raises for anything it does not know
    else:
        for each in {name, "replay"} if name == "advise" else {name}:  # it hands on what is replay's
            with pytest.raises(SystemExit):
                cli.main([each, "--help"])
        told = capsys.readouterr().out
        for option in (word for word in arguments if word.startswith("--")):
            assert re.search(rf"{option}\b", told), f"{document}: {name} has no {option}"


FILES = [
    (path.name, block)
    for path in DOCUMENTS
    for block in re.findall(r"^```yaml\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize(("document", "text"), FILES, ids=lambda value: value[:40])
def test_a_configuration_of_the_documents_can_be_read(document, text, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    assert read_cluster_config(file) != ClusterConfig(), f"{document}: it says nothing"


def test_there_are_configurations_to_test():
    assert len(FILES) >= 3
