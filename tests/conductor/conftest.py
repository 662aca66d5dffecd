import pytest

from conductor.served_model import ServedModel
from tests.conductor.fakes import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))
