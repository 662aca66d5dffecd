from collections.abc import Iterator

import pytest

from conductor.api.served_model import ServedModel
from tests.certificates import Authority
from tests.conductor.fakes import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session", autouse=True)
def _few_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have clients trust one authority: each reads all that it trusts, of which a host has a hundred."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SSL_CERT_FILE", Authority(tmp_path_factory.mktemp("authority")).path)
        yield
