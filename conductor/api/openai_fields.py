"""Fields of OpenAI's and vLLM's requests that our schemas do not have: refused by name, or without effect.

A field that is *done* is in `openai_schema.py`. One that would change the answer, and that we do not do, is
refused by name, but for the values that ask for what we do anyway: an answer that silently is not the JSON,
the tool call or the choice that was asked for is worse than none. One that changes no answer is ignored, and
here is why. Fields that stand in neither API are ignored too, because clients send many.

`python docs/generate_api.py` writes this table into docs/reference/api.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_REFUSED_BUT_FOR: tuple[tuple[tuple[Any, ...], str], ...] = (
    (
        (None,),
        "audio chat_template kv_transfer_params prompt_embeds repetition_detection structural_tag "
        "truncate_prompt_tokens truncation_side "
        "web_search_options",
    ),
    (
        (None, False),
        "add_special_tokens continue_final_message echo return_token_strs "
        "return_tokens_as_token_ids use_beam_search",
    ),
    ((None, []), "allowed_token_ids bad_words documents functions logits_processors tools"),
    ((None, {}), "media_io_kwargs mm_processor_kwargs vllm_xargs"),
)
REFUSED: Mapping[str, tuple[Any, ...]] = {
    **{name: values for values, names in _REFUSED_BUT_FOR for name in names.split()},
    "best_of": (None, 1),
    "function_call": (None, "none", "auto"),
    "length_penalty": (None, 1, 1.0),
    "modalities": (None, ["text"]),
    "prompt_logprobs": (None, 0),
    "spaces_between_special_tokens": (None, True),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "verbosity": (None, "medium"),
}
"""The refused fields, each with the values that change nothing, and so are taken."""

IGNORED: Mapping[str, str] = {
    "guided_decoding_backend": "says what follows a grammar; here one library does",
    "guided_whitespace_pattern": "says what may stand between parts of JSON: little, whoever asks",
    "metadata": "is kept with a stored answer; none is stored",
    "moderation": "asks for a moderation of the provider's; none is done",
    "prediction": "makes an answer sooner, never another one",
    "prompt_cache_key": "names a cache; prefixes are found by their tokens",
    "prompt_cache_options": "says how a cache is used; prefixes are found by their tokens",
    "prompt_cache_retention": "says how long a cache lasts; blocks leave by use",
    "safety_identifier": "names an end user to the provider",
    "service_tier": "names a tier of the provider's; `priority` is ours",
    "store": "keeps an answer to be asked for later; none is kept",
    "user": "names an end user to the provider",
}
"""The ignored fields, each with why it changes no answer."""


NEUTRAL: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values of a field of another API's that ask for nothing."""

NEUTRAL_TOO: Mapping[str, tuple[Any, ...]] = {
    "n": (1, 1.0),
    "response_format": ({"type": "text"},),
    "add_generation_prompt": (True,),
    "include_reasoning": (True,),
    "parallel_tool_calls": (True,),
    "skip_special_tokens": (True,),
}
"""Values of one field each that ask for what is done anyway."""

FOR_NOBODY = ("stream_options", "request_id")
"""Fields of another API's that change no answer: usage is in every stream, and a header names a request."""


def refused_or_none(extra: Mapping[str, Any], elsewhere: Collection[str] = ()) -> str | None:
    """Return the first of a body's further fields that asks for what is not done, or None.

    `elsewhere`: fields that another API's body has, and that would be done there.
    """
    for name, value in extra.items():
        taken = REFUSED.get(name)
        if taken is None and name in elsewhere and name not in (*IGNORED, *FOR_NOBODY):
            taken = (*NEUTRAL, *NEUTRAL_TOO.get(name, ()))
        # True is 1 to Python: types are compared too.
        if taken is not None and not any(type(value) is type(each) and value == each for each in taken):
            return name
    return None
