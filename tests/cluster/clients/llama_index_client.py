"""LlamaIndex's OpenAILike: completions, chats, streams, typed answers, a tool; OpenAILikeEmbedding."""

import os
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

ANSWER = "The capital of France is Paris."
ASKED = [ChatMessage(role="user", content="In one sentence: what is the capital of France?")]


class City(BaseModel):
    """A city of the world."""

    name: str = Field(max_length=20)
    kind: Literal["capital", "town", "village"]


def weather(city: Literal["Paris", "London"]) -> str:
    """Tell the weather of a city."""
    return f"rain in {city}"


def opened(**settings):
    url = f"{os.environ['CONDUCTOR_URL']}/v1"
    settings = {"temperature": 0.0, "max_tokens": 64, "max_retries": 0, **settings}
    return OpenAILike(model="smollm2", api_base=url, api_key="none", context_window=8192, **settings)


llm = opened(is_chat_model=True, is_function_calling_model=True)
assert llm.chat(ASKED).message.content == ANSWER
pieces = [piece.delta or "" for piece in llm.stream_chat(ASKED)]
assert "".join(pieces) == ANSWER
assert len(pieces) > 5
told = llm.chat_with_tools(
    [FunctionTool.from_defaults(weather)], user_msg="The weather in Paris?", tool_required=True
)
(call,) = llm.get_tool_calls_from_response(told)
assert call.tool_name == "weather", call
assert call.tool_kwargs["city"] in ("Paris", "London"), call
city = llm.structured_predict(City, PromptTemplate("Tell me about {name}."), name="Paris")
assert isinstance(city, City), city
plain = opened(is_chat_model=False)
assert "Paris" in plain.complete("The capital of France is", max_tokens=8).text
assert len(list(plain.stream_complete("The capital of France is", max_tokens=8))) > 3

embeddings = OpenAILikeEmbedding(
    model_name="smollm2", api_base=f"{os.environ['CONDUCTOR_URL']}/v1", api_key="none", embed_batch_size=10
)
texts = ["The capital of France is Paris.", "Cats sleep all day.", *map(str, range(25))]
vectors = embeddings.get_text_embedding_batch(texts)
assert [len(vector) for vector in vectors] == [576] * len(texts)
alone = embeddings.get_query_embedding(texts[0])
assert abs(embeddings.similarity(alone, vectors[0]) - 1.0) < 1e-5
assert embeddings.similarity(vectors[0], vectors[1]) < 0.9999
