"""LangChain's ChatOpenAI: chats, streams, batches, tools, typed answers; its OpenAIEmbeddings."""

import os
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

QUESTION = "In one sentence: what is the capital of France?"
ANSWER = "The capital of France is Paris."
URL = f"{os.environ['CONDUCTOR_URL']}/v1"


class City(BaseModel):
    """A city of the world."""

    name: str = Field(max_length=20)
    kind: Literal["capital", "town", "village"]


@tool
def weather(city: Literal["Paris", "London"], days: Literal[1, 2, 3]) -> str:
    """Tell the weather of a city."""
    return f"rain in {city} for {days} days"


def check_tools(chat):
    asked = [HumanMessage("What is the weather in Paris?")]
    called = chat.bind_tools([weather], tool_choice="any").invoke(asked)
    (call,) = called.tool_calls
    assert call["name"] == "weather", call
    told = weather.invoke(call)
    assert isinstance(told, ToolMessage)
    answer = chat.bind_tools([weather], tool_choice="none").invoke([*asked, called, told])
    assert isinstance(answer, AIMessage)
    assert answer.content, answer
    whole = None
    for chunk in chat.bind_tools([weather], tool_choice="weather").stream(asked):
        whole = chunk if whole is None else whole + chunk
    assert [(each["name"], each["args"]) for each in whole.tool_calls] == [("weather", call["args"])], whole


for settings in ({}, {"use_responses_api": True}):
    chat = ChatOpenAI(
        model="smollm2", base_url=URL, api_key="none", temperature=0, max_tokens=64, max_retries=0, **settings
    )
    answer = chat.invoke(QUESTION)
    assert answer.text == ANSWER, answer
    assert answer.usage_metadata["output_tokens"] == 8, answer.usage_metadata
    pieces = list(chat.stream(QUESTION))
    assert len(pieces) > 5
    assert "".join(piece.text for piece in pieces) == ANSWER
    assert [each.text for each in chat.batch([QUESTION, QUESTION])] == [ANSWER, ANSWER]
    check_tools(chat)
    for method in ("json_schema", "function_calling"):
        city = chat.with_structured_output(City, method=method).invoke("Tell me about Paris.")
        assert isinstance(city, City), (method, city)

# Its own way of counting tokens fetches OpenAI's tokenizer.
embeddings = OpenAIEmbeddings(
    model="smollm2", base_url=URL, api_key="none", check_embedding_ctx_length=False, dimensions=128
)
texts = ["The capital of France is Paris.", "Cats sleep all day.", *map(str, range(40))]
vectors = embeddings.embed_documents(texts)
assert [len(vector) for vector in vectors] == [128] * len(texts)
assert all(abs(sum(number * number for number in vector) - 1.0) < 1e-5 for vector in vectors)
alone = embeddings.embed_query(texts[0])
assert max(abs(one - other) for one, other in zip(alone, vectors[0], strict=True)) < 1e-5
