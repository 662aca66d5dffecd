"""What is committed of generated code and of the API reference is what the sources make."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.generators import loaded

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("protos")
    plugin = Path(sys.executable).parent / "protoc-gen-mypy_grpc"
    outs = (f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python", "mypy_grpc"))
    protos = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "protos").glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--plugin=protoc-gen-mypy_grpc={plugin}"]
    subprocess.run([*command, *outs, *protos], cwd=ROOT, check=True, timeout=60)
    return folder / "protos"


def test_the_same_files_are_generated(generated):
    names = {path.name for path in generated.iterdir()}
    assert names == {path.name for path in (ROOT / "protos").glob("*_pb2*")}


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "protos").glob("*_pb2*")))
def test_a_generated_file_is_current(generated, name):
    assert (ROOT / "protos" / name).read_text() == (generated / name).read_text(), "run `make protos`"


@pytest.mark.parametrize(
    ("file", "text"), loaded("generate_api").files().items(), ids=lambda value: getattr(value, "name", "")
)
def test_the_api_reference_is_current(file, text):
    assert file.read_text() == text, "run `make protos`"
