"""instructor: typed answers by tools, by JSON schema, piece by piece and several at once."""

import os
from typing import Annotated, Literal

import instructor
import openai
from pydantic import BaseModel, Field, StringConstraints

MESSAGES = [{"role": "user", "content": "Tell me about Paris, the capital of France."}]


class City(BaseModel):
    """A city of the world."""

    name: Annotated[str, StringConstraints(max_length=20)]
    population: int = Field(ge=0, le=20_000_000)
    kind: Literal["capital", "town", "village"]


asked = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_tokens": 200}
with openai.OpenAI(base_url=f"{os.environ['CONDUCTOR_URL']}/v1", api_key="none") as opened:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        client = instructor.from_openai(opened, mode=mode)
        city = client.chat.completions.create(response_model=City, max_retries=0, **asked)
        assert isinstance(city, City), (mode, city)
        *_, last = client.chat.completions.create_partial(response_model=City, max_retries=0, **asked)
        assert last.model_dump() == city.model_dump(), (mode, last, city)
    client = instructor.from_openai(opened, mode=instructor.Mode.TOOLS)
    city, raw = client.chat.completions.create_with_completion(response_model=City, max_retries=0, **asked)
    assert raw.usage.completion_tokens > 5
