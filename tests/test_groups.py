"""What is expected of pytest: tests that share stay on one worker, and find their fixtures in any order."""

import subprocess
import sys
from pathlib import Path

import pytest


def test_the_tests_of_a_file_are_one_group(request: pytest.FixtureRequest) -> None:
    if not hasattr(request.config, "workerinput"):
        pytest.skip("one process: there are no workers to keep them on")
    assert request.node.nodeid.endswith("@test_groups.py")


def test_a_folder_that_is_named_before_and_after_another_file_keeps_its_fixtures(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "conftest.py").write_text("import pytest\n\n\n@pytest.fixture\ndef given():\n    return 1\n")
    files = [folder / "test_a.py", tmp_path / "test_b.py", folder / "test_c.py"]
    for file in files:
        name = "" if file.parent == tmp_path else "given"
        file.write_text(f"def test_it({name}):\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert "3 passed" in done.stdout, done.stdout
