# ruff: noqa: E501  (bodies are not broken)
"""Models for conversations with tools, and conductors whose cluster says what a test tells it to."""

import json

from conductor.api.served_model import load_served_model
from tests.conductor.fakes import MODEL, serving, spoken, write_model_folder

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function.name }}({{ call.function.arguments | tojson }})"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)


def long_model(folder, template, family=""):
    write_model_folder(folder)
    table = {"max_position_embeddings": 8192, "vocab_size": 263, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(table))
    (folder / "chat_template.jinja").write_text(template)
    return load_served_model(folder, MODEL, family)


def talking(model, script, **spoken_options):
    """Serve a model that says the text `script`, or what it returns for a request."""
    said = (lambda request: spoken(model, script, **spoken_options)) if isinstance(script, str) else script
    return serving(model, said)


def prompt_of(model, api, index=0):
    return model.tokenizer.decode(api.dispatcher.requests[index].token_ids, skip_special_tokens=False)


def deep(levels):
    schema = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema
