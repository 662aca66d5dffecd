"""How the benches' driver of an engine says what went wrong."""

import pytest

from base.clock import SystemClock
from base.config import EngineConfig
from base.errors import InvalidRequestError
from bench.engine_work import Driver, Prompts
from engine.build import assemble_engine
from engine.model import PagedModel
from tests.engine.test_gpu_model import make_family


async def test_a_prompt_that_the_engine_refuses_is_said_with_its_reason():
    config = EngineConfig(device="cpu", kv_cache_gib=0.01, threads=1)
    engine = assemble_engine(config, PagedModel(make_family("llama")), SystemClock())
    driver = Driver(engine, Prompts(engine.vocab_size, 0))
    with pytest.raises(InvalidRequestError, match="tokens"):
        await driver.prefill_s(10 * engine.max_model_len, 1)
    await driver.close()
