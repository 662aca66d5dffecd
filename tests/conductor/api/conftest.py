import pytest

from tests.conductor.api.conversing import WITH_TOOLS, long_model
from tests.conductor.fakes import CHAT_TEMPLATE


@pytest.fixture
def plain(tmp_path):
    return long_model(tmp_path, CHAT_TEMPLATE)


@pytest.fixture
def tooled(tmp_path):
    return long_model(tmp_path, WITH_TOOLS)
