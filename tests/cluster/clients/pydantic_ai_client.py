"""pydantic-ai: an agent with typed output, by OpenAI's chats, its Responses API and Anthropic's."""

import asyncio
import os
from typing import Annotated, Literal

from pydantic import BaseModel, Field, StringConstraints
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL = os.environ["CONDUCTOR_URL"]
SETTINGS = {"temperature": 0.0, "max_tokens": 200}


class City(BaseModel):
    name: Annotated[str, StringConstraints(max_length=20)]
    population: int = Field(ge=0, le=20_000_000)
    kind: Literal["capital", "town", "village"]


def models():
    openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    yield OpenAIChatModel("smollm2", provider=openai)
    yield OpenAIResponsesModel("smollm2", provider=openai)
    yield AnthropicModel("smollm2", provider=AnthropicProvider(base_url=URL, api_key="none"))


async def main():
    for model in models():
        typed = Agent(model, output_type=City, model_settings=SETTINGS)
        found = await typed.run("Tell me about Paris.")
        assert isinstance(found.output, City), (model, found)
        assert found.usage.output_tokens > 5, (model, found.usage)
        plain = Agent(model, model_settings=SETTINGS)
        async with plain.run_stream("In one sentence: what is the capital of France?") as streamed:
            pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
        assert "Paris" in "".join(pieces), (model, pieces)
        assert len(pieces) > 5, (model, pieces)
        if not isinstance(model, AnthropicModel):
            native = Agent(model, output_type=NativeOutput(City), model_settings=SETTINGS)
            assert isinstance((await native.run("Tell me about Paris.")).output, City)


asyncio.run(main())
