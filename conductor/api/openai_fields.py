"""Fields of OpenAI's and vLLM's requests that our schemas do not have: refused by name, or without effect.

A field that is *done* is in `openai_schema.py`. One that would change the answer, and that we do not do, is
refused by name, but for the values that ask for what we do anyway: an answer that silently is not the JSON,
the tool call or the choice that was asked for is worse than none. One that changes no answer is ignored, and
here is why. Fields that stand in neither API are ignored too, because clients send many.

`python -m deploy.reference` writes this table into docs/reference.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (None, False),
    "allowed_token_ids": (None, []),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "echo": (None, False),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1, 1.0),
    "logits_processors": (None, []),
    "media_io_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None, 0),
    "reasoning_effort": (None,),
    "repetition_detection": (None,),
    "response_format": (None, {"type": "text"}),
    "return_token_strs": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "spaces_between_special_tokens": (None, True),
    "structural_tag": (None,),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "thinking_token_budget": (None,),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "truncation_side": (None,),
    "use_beam_search": (None, False),
    "verbosity": (None, "medium"),
    "vllm_xargs": (None, {}),
    "web_search_options": (None,),
}
"""The values that change nothing, and so are taken, of each."""

IGNORED: Mapping[str, str] = {
    "guided_decoding_backend": "says how a guided answer is made; those are refused",
    "guided_whitespace_pattern": "says how a guided answer is made; those are refused",
    "include_reasoning": "no reasoning is parted from an answer: all of it is there",
    "metadata": "is kept with a stored answer; none is stored",
    "moderation": "asks for a moderation of the provider's; none is done",
    "parallel_tool_calls": "says how tools are called; they are refused",
    "prediction": "makes an answer sooner, never another one",
    "prompt_cache_key": "names a cache; prefixes are found by their tokens",
    "prompt_cache_options": "says how a cache is used; prefixes are found by their tokens",
    "prompt_cache_retention": "says how long a cache lasts; blocks leave by use",
    "safety_identifier": "names an end user to the provider",
    "service_tier": "names a tier of the provider's; `priority` is ours",
    "store": "keeps an answer to be asked for later; none is kept",
    "user": "names an end user to the provider",
}
"""Why each changes no answer."""


def refused_or_none(extra: Mapping[str, Any]) -> str | None:
    """Return the first of a body's further fields that asks for what is not done, or None."""
    return next((name for name, value in extra.items() if not _is_neutral(name, value)), None)


def _is_neutral(name: str, value: Any) -> bool:
    # True is 1 to Python: types are compared too.
    return name not in REFUSED or any(type(value) is type(each) and value == each for each in REFUSED[name])
