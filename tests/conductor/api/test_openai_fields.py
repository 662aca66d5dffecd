"""Every field of OpenAI's and vLLM's requests is done, refused by name, or ignored for a reason."""

import json

import httpx
import pytest

from base.errors import InvalidRequestError
from base.request import SAMPLING_FIELDS, SamplingParams, Slo
from conductor.api.headers import Caller
from conductor.api.openai_fields import IGNORED, REFUSED
from conductor.api.openai_schema import ChatBody, CompletionBody, read_body
from conductor.api.options import Options, check_options
from protos import inference_pb2, nodes_pb2
from tests.conductor.fakes import MAX_MODEL_LEN, MODEL, serving, spoken

OPENAI_BOTH = """frequency_penalty logit_bias logprobs max_tokens model n presence_penalty seed stop stream
    stream_options temperature top_p user"""
OPENAI_CHAT = """messages audio function_call functions max_completion_tokens metadata modalities moderation
    parallel_tool_calls prediction prompt_cache_key prompt_cache_options prompt_cache_retention
    reasoning_effort response_format safety_identifier service_tier store tool_choice tools top_logprobs
    verbosity
    web_search_options"""
OPENAI_COMPLETION = "prompt best_of echo suffix"
VLLM_BOTH = """add_special_tokens allowed_token_ids bad_words cache_salt guided_choice guided_decoding_backend
    guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos include_stop_str_in_output
    kv_transfer_params length_penalty logits_processors min_p min_tokens priority prompt_logprobs
    repetition_detection repetition_penalty request_id response_format return_token_ids
    return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens stop_token_ids structural_tag
    structured_outputs top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs"""
VLLM_CHAT = """add_generation_prompt chat_template chat_template_kwargs continue_final_message documents echo
    include_reasoning media_io_kwargs mm_processor_kwargs thinking_token_budget"""
VLLM_COMPLETION = "prompt_embeds"
FIELDS = {
    ChatBody: f"{OPENAI_BOTH} {OPENAI_CHAT} {VLLM_BOTH} {VLLM_CHAT}".split(),
    CompletionBody: f"{OPENAI_BOTH} {OPENAI_COMPLETION} {VLLM_BOTH} {VLLM_COMPLETION}".split(),
}
LEAST = {
    ChatBody: '"model":"tiny","messages":[{"role":"user","content":"a"}]',
    CompletionBody: '"model":"tiny","prompt":"a"',
}


GRPC = {
    **{f"{name}": f"sampling.{name}" for name in (*SAMPLING_FIELDS, "logit_bias")},
    **dict.fromkeys(("response_format", "structured_outputs"), "sampling.grammar"),
    **{f"guided_{kind}": "sampling.grammar" for kind in ("json", "regex", "choice", "grammar")},
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "stop.max_tokens"),
    **{f"{name}": f"stop.{name}" for name in ("min_tokens", "ignore_eos", "include_stop_str_in_output")},
    "stop": "stop.strings",
    "stop_token_ids": "stop.token_ids",
    **{f"{name}": f"chat.{name}" for name in ("messages", "tools", "tool_choice", "chat_template_kwargs")},
    "add_generation_prompt": "chat.add_generation_prompt",
    "parallel_tool_calls": "chat.tool_choice.one_call",
    "reasoning_effort": "chat.reasoning.effort",
    "include_reasoning": "chat.reasoning.is_hidden",
    "thinking_token_budget": "chat.reasoning.budget_tokens",
    "prompt": "text",
    "logprobs": "num_logprobs",
    "top_logprobs": "num_logprobs",
    **{name: name for name in ("model", "request_id", "priority", "cache_salt", "parse_special_tokens")},
    **{name: name for name in ("skip_special_tokens", "add_special_tokens", "n", "echo")},
}
"""The field of gRPC's request that does what a field of an HTTP body does."""
NOT_ASKED_FOR = {"stream", "stream_options", "return_token_ids"}
"""Switches of HTTP for what gRPC does always."""


def test_grpc_has_every_field_of_http():
    for http in (ChatBody, CompletionBody):
        assert not http.model_fields.keys() - GRPC.keys() - NOT_ASKED_FOR
    for path in GRPC.values():
        message = inference_pb2.GenerateRequest.DESCRIPTOR
        for name in path.split("."):
            assert name in message.fields_by_name, path
            message = message.fields_by_name[name].message_type


def test_every_api_spells_how_tokens_are_sampled_alike():
    names = set(SamplingParams._fields)
    assert set(inference_pb2.Sampling.DESCRIPTOR.fields_by_name) == names
    assert set(nodes_pb2.SamplingParams.DESCRIPTOR.fields_by_name) == names
    assert {*SAMPLING_FIELDS, "logit_bias", "grammar"} == names
    # OpenAI's and vLLM's have names of their own for a grammar.
    spelled = {*names, "response_format", "structured_outputs"} - {"grammar"}
    assert all(spelled <= body.model_fields.keys() for body in (ChatBody, CompletionBody))


@pytest.mark.parametrize("name", SAMPLING_FIELDS)
def test_bounds_are_those_that_the_description_shows(model, name):
    field, caller = SAMPLING_FIELDS[name], Caller(0.0, Slo())
    shown = ChatBody.model_json_schema()["properties"][name]["anyOf"][0]
    assert (shown["minimum"], shown["maximum"]) == (field.low, field.high)
    for value in (field.low, field.high):
        check_options(Options(sampling={name: value}), caller, model)
    for value in (field.low - 1, field.high * 2, float("nan")):
        with pytest.raises(InvalidRequestError) as refused:
            check_options(Options(sampling={name: value}), caller, model)
        assert refused.value.param == name


@pytest.mark.parametrize("body", FIELDS)
def test_every_field_of_both_apis_is_done_refused_or_ignored(body):
    known = body.model_fields.keys() | REFUSED.keys() | IGNORED.keys()
    assert set(FIELDS[body]) <= known


def test_no_field_is_refused_and_ignored():
    assert not REFUSED.keys() & IGNORED.keys()
    listed = {name for names in FIELDS.values() for name in names}
    assert REFUSED.keys() | IGNORED.keys() <= listed | {"return_token_strs"}


@pytest.mark.parametrize("body", FIELDS)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_change_the_answer_is_refused_by_name(body, name):
    if name in body.model_fields:
        return
    switch = "false" if True in REFUSED[name] else "true"
    for value in (switch, '"x"', "[1]", '{"a":1}', "7"):
        with pytest.raises(InvalidRequestError, match=f"{name} is not supported") as refused:
            read_body(f'{{{LEAST[body]},"{name}":{value}}}'.encode(), body)
        assert refused.value.param == name


@pytest.mark.parametrize("body", FIELDS)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_value_that_asks_for_what_we_do_anyway_is_taken(body, name):
    for value in REFUSED[name]:
        assert read_body(f'{{{LEAST[body]},"{name}":{json.dumps(value)}}}'.encode(), body)


@pytest.mark.parametrize("body", FIELDS)
@pytest.mark.parametrize("name", sorted(IGNORED))
def test_what_changes_no_answer_is_taken(body, name):
    assert read_body(f'{{{LEAST[body]},"{name}":"x"}}'.encode(), body)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(model, path):
    """LiteLLM and others tell an overflow of the context window by these words."""
    text = "a b " * MAX_MODEL_LEN
    body = (
        {"model": MODEL, "prompt": text}
        if path == "/v1/completions"
        else {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    )
    async with (
        serving(model, lambda request: spoken(model, "no")) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        long = await client.post(path, json=body)
        greedy = await client.post(
            "/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": MAX_MODEL_LEN}
        )
    for answer in (long, greedy):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert (
            f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, you" in error["message"]
        )
