"""LiteLLM: chats, streams, tools that must be called, schemas, completions, Anthropic's and Responses."""

import gc
import json
import os

import litellm

# LiteLLM leaves a stream's generators unread after the last event. Collected while httpcore's pool holds its
# lock, they close the connection, wait for that lock in the same thread, and the client stands for ever.
gc.disable()

URL = os.environ["CONDUCTOR_URL"]
ANSWER = "The capital of France is Paris."
ASKED = [{"role": "user", "content": "In one sentence: what is the capital of France?"}]
COMMON = {"api_key": "none", "temperature": 0, "max_tokens": 64, "num_retries": 0}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "London"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}

litellm.suppress_debug_info = True
for model, base in (
    ("openai/smollm2", f"{URL}/v1"),
    ("hosted_vllm/smollm2", f"{URL}/v1"),
    ("anthropic/smollm2", URL),
):
    asked = {"model": model, "api_base": base, "messages": ASKED, **COMMON}
    whole = litellm.completion(**asked)
    assert whole.choices[0].message.content == ANSWER, (model, whole)
    assert whole.usage.completion_tokens == 8, (model, whole.usage)
    chunks = list(litellm.completion(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER, (model, chunks)
    for stream in (False, True):
        told = litellm.completion(**asked, tools=[TOOL], tool_choice="required", stream=stream)
        told = litellm.stream_chunk_builder(list(told)) if stream else told
        (call,) = told.choices[0].message.tool_calls
        assert call.function.name == "weather", (model, call)
        assert json.loads(call.function.arguments)["city"] in ("Paris", "London"), (model, call)
    if "anthropic" not in model:
        formed = litellm.completion(**asked, response_format=FORM)
        assert json.loads(formed.choices[0].message.content)["city"] in ("Paris", "London"), (model, formed)

text = litellm.text_completion(
    model="text-completion-openai/smollm2", api_base=f"{URL}/v1", prompt="The capital of France is", **COMMON
)
assert "Paris" in text.choices[0].text, text
response = litellm.responses(
    model="openai/smollm2", api_base=f"{URL}/v1", input=ASKED[0]["content"], api_key="none", temperature=0
)
assert response.output[-1].content[0].text == ANSWER, response
