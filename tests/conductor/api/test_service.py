"""gRPC for clients, by the generated stub against a real server."""

import json
from contextlib import asynccontextmanager

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from base.errors import LostError, ProtocolError, RejectedError, SloUnreachableError, UnavailableError
from base.request import FinishReason, Slo
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.conductor.api.conversing import CALL, deep, prompt_of
from tests.conductor.fakes import MODEL, serving, spoken


@asynccontextmanager
async def calling(model, script, **server):
    async with (
        serving(model, script, server=server) as api,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        yield inference_pb2_grpc.InferenceStub(channel), api


async def answer(stub, **fields):
    return [response async for response in stub.Generate(pb.GenerateRequest(**fields))]


async def refusal(stub, **fields):
    """The status that a call ends with, and its details by type."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(stub, **fields)
    trailers = dict(caught.value.trailing_metadata())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    kinds = {
        kind.DESCRIPTOR.full_name: kind
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo)
    }
    details = {}
    for packed in status.details:
        kind = kinds[packed.TypeName()]
        details[kind.__name__] = kind.FromString(packed.value)
    assert status.code == caught.value.code().value[0]
    return caught.value, details


def ids(model, text):
    return list(model.tokenizer.encode(text, add_special_tokens=False))


async def test_text_token_ids_and_chat_are_answered_alike(model):
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x")])
    async with calling(model, lambda request: spoken(model, "hé🎉")) as (stub, api):
        for fields in ({"text": "say"}, {"token_ids": pb.TokenIds(ids=ids(model, "say"))}, {"chat": chat}):
            responses = await answer(stub, **fields)
            assert "".join(response.text for response in responses) == "hé🎉"
            assert [token for response in responses for token in response.token_ids] == [
                *ids(model, "hé🎉"),
                0,
            ]
    seen = [list(request.token_ids) for request in api.dispatcher.requests]
    assert seen == [
        ids(model, "say"),
        ids(model, "say"),
        ids(model, "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"),
    ]


async def test_last_response_alone_has_finish_reason_and_usage(model):
    script = spoken(model, "hi", finish=FinishReason.LENGTH, num_cached_tokens=2)
    async with calling(model, lambda request: script) as (stub, _):
        responses = await answer(stub, text="say", request_id="mine")
    assert [response.finish_reason for response in responses] == ["", "length"]
    assert [response.request_id for response in responses] == ["mine", "mine"]
    assert not responses[0].HasField("usage")
    assert responses[1].usage == pb.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=2)


async def test_every_option_reaches_the_request(model):
    async with calling(model, lambda request: spoken(model, "hi"), critical_tenants=("*",)) as (stub, api):
        await answer(
            stub,
            model=MODEL,
            text="say",
            sampling=pb.Sampling(
                temperature=0.0,
                top_k=3,
                top_p=0.5,
                min_p=0.25,
                repetition_penalty=1.5,
                presence_penalty=0.5,
                frequency_penalty=-0.5,
                seed=-1,
                logit_bias={7: -100.0},
            ),
            stop=pb.Stop(max_tokens=9, min_tokens=2, strings=["zz"], token_ids=[5], ignore_eos=True),
            num_logprobs=4,
            slo=pb.Slo(ttft_s=0.25, tbt_s=0.05),
            priority=3,
            cache_salt="mine",
        )
        await answer(stub, text="say")
    request, plain = api.dispatcher.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 3, 0.5, 0.25)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, 0.5)
    assert (sampling.frequency_penalty, sampling.seed) == (-0.5, 2**64 - 1)
    assert sampling.logit_bias == ((7, -100.0),)
    assert (request.stop.max_tokens, request.stop.min_tokens, request.stop.stop_token_ids) == (9, 2, (5,))
    assert (request.num_logprobs, request.priority, request.cache_salt) == (4, 3, "mine")
    assert (request.slo.ttft_slo_s, request.slo.tbt_slo_s) == (0.25, 0.05)
    assert (plain.sampling.temperature, plain.stop.stop_token_ids, plain.deadline_s) == (0.5, (0, 2), None)
    assert plain.stop.max_tokens == model.max_model_len - 3


async def test_what_ends_an_answer_and_special_tokens_are_shown_where_asked_for(model):
    async with calling(model, lambda request: spoken(model, "hi <|im_start|>there")) as (stub, _):
        texts = [
            "".join(response.text for response in await answer(stub, text="say", **fields))
            for fields in (
                {},
                {"skip_special_tokens": True},
                {"skip_special_tokens": False},
                {"stop": pb.Stop(strings=["th"])},
                {"stop": pb.Stop(strings=["th"], include_stop_str_in_output=True)},
            )
        ]
    assert texts == ["hi there", "hi there", "hi <|im_start|>there", "hi ", "hi th"]


async def test_a_chat_sets_the_variables_of_its_template_and_may_leave_the_answer_unopened(tooled):
    asked = [
        talk(QUESTION_TURN),
        talk(QUESTION_TURN, chat_template_kwargs='{"enable_thinking": true}'),
        talk(QUESTION_TURN, add_generation_prompt=False),
        talk(QUESTION_TURN, add_generation_prompt=True, chat_template_kwargs="{}"),
    ]
    async with calling(tooled, lambda request: spoken(tooled, "hi")) as (stub, api):
        for fields in asked:
            await answer(stub, **fields)
        plain, thinking, unopened, opened = (prompt_of(tooled, api, at) for at in range(4))
    assert plain == opened
    assert thinking == f"{plain}<think>\n"
    assert plain.startswith(unopened)
    assert plain.removeprefix(unopened) == "<|im_start|>assistant\n"


async def test_logprobs_come_with_their_tokens(model):
    async with calling(model, lambda request: spoken(model, "h", with_logprobs=True)) as (stub, _):
        responses = await answer(stub, text="say", num_logprobs=1)
    first = responses[0].logprobs[0]
    assert (first.sampled.token_id, first.sampled.logprob) == (responses[0].token_ids[0], -0.5)
    assert [top.token_id for top in first.top] == [100, 101]


INVALID = [
    ({}, "input"),
    ({"text": ""}, "text"),
    ({"token_ids": pb.TokenIds(ids=[10**6])}, "token_ids.ids"),
    ({"text": "x" * 300}, "text"),
    ({"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="root")])}, "chat.messages"),
    ({"chat": pb.ChatMessages()}, "chat.messages"),
    ({"text": "x", "sampling": pb.Sampling(temperature=float("nan"))}, "sampling.temperature"),
    ({"text": "x", "sampling": pb.Sampling(top_p=float("inf"))}, "sampling.top_p"),
    ({"text": "x", "stop": pb.Stop(max_tokens=0)}, "stop.max_tokens"),
    ({"text": "x", "stop": pb.Stop(max_tokens=2**32 - 1)}, "stop.max_tokens"),
    ({"text": "x", "stop": pb.Stop(strings=[""])}, "stop.strings"),
    ({"text": "x", "stop": pb.Stop(token_ids=[10**6])}, "stop.token_ids"),
    ({"text": "x", "num_logprobs": 21}, "num_logprobs"),
    ({"text": "x", "slo": pb.Slo(ttft_s=-1.0)}, "slo.ttft_s"),
    ({"text": "x", "request_id": "a\nb"}, "request_id"),
]


async def test_mistakes_are_refused_by_field(model):
    async with calling(model, lambda request: []) as (stub, api):
        for fields, field in INVALID:
            error, details = await refusal(stub, **fields)
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, fields
            assert [item.field for item in details["BadRequest"].field_violations] == [field]
        assert api.dispatcher.requests == []


async def test_unknown_model_is_not_found(model):
    async with calling(model, lambda request: []) as (stub, _):
        error, details = await refusal(stub, text="x", model="gpt-5")
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert details["ErrorInfo"].reason == "UnknownModelError"


@pytest.mark.parametrize(
    ("failure", "code", "retry_s"),
    [
        (RejectedError("full", 1.5), grpc.StatusCode.RESOURCE_EXHAUSTED, 1.5),
        (UnavailableError("no node"), grpc.StatusCode.UNAVAILABLE, 2.0),
        (LostError("node died"), grpc.StatusCode.UNAVAILABLE, 2.0),
    ],
)
async def test_failure_says_when_to_come_back(model, failure, code, retry_s):
    async with calling(model, lambda request: [*spoken(model, "hi")[:1], failure]) as (stub, _):
        error, details = await refusal(stub, text="x")
    assert (error.code(), error.details()) == (code, str(failure))
    assert details["RetryInfo"].retry_delay.ToTimedelta().total_seconds() == retry_s
    assert details["ErrorInfo"].reason == type(failure).__name__


async def test_a_rejection_tells_what_was_predicted(model):
    failure = SloUnreachableError("too late", 2.0, predicted_ttft_s=1.25, predicted_tbt_s=0.03)
    async with calling(model, lambda request: [failure]) as (stub, _):
        _, details = await refusal(stub, text="x")
    assert details["ErrorInfo"].metadata == {"predicted_ttft_s": "1.25", "predicted_tbt_s": "0.03"}


async def test_metadata_bounds_a_request_the_message_goes_before_and_a_deadline_bounds_its_ttft(model):
    metadata = (("x-slo-ttft-ms", "250"), ("x-slo-tpot-ms", "40"), ("x-tenant-id", "acme"))
    async with calling(model, lambda request: spoken(model, "hi")) as (stub, api):
        for fields, timeout in (({}, None), ({"slo": pb.Slo(ttft_s=2.0)}, None), ({}, 0.2)):
            call = stub.Generate(pb.GenerateRequest(text="x", **fields), metadata=metadata, timeout=timeout)
            assert [response async for response in call]
        with pytest.raises(grpc.aio.AioRpcError, match="x-slo-ttft-ms"):
            await anext(
                aiter(stub.Generate(pb.GenerateRequest(text="x"), metadata=(("x-slo-ttft-ms", "-1"),)))
            )
        with pytest.raises(grpc.aio.AioRpcError, match="x-tenant-id: it stands twice"):
            await anext(aiter(stub.Generate(pb.GenerateRequest(text="x"), metadata=metadata[2:] * 2)))
    slos = [request.slo for request in api.dispatcher.requests]
    assert slos[:2] == [Slo(0.25, 0.04), Slo(2.0, 0.04)]
    assert 0 < slos[2].ttft_slo_s < 0.21, "on the wire a deadline is rounded up"
    assert {request.tenant for request in api.dispatcher.requests} == {"acme"}


async def test_protocol_error_has_no_retry(model):
    async with calling(model, lambda request: [ProtocolError("odd")]) as (stub, _):
        error, details = await refusal(stub, text="x")
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "RetryInfo" not in details


async def test_bug_is_told_as_nothing_but_a_bug(model):
    def broken(request):
        raise KeyError("secret detail")

    async with calling(model, broken) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError, match="the server failed") as caught:
            await answer(stub, text="x")
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value)


async def test_long_message_is_refused(model):
    async with calling(model, lambda request: []) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(stub, text="x" * (2 << 20))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_models_are_listed(model):
    async with calling(model, lambda request: []) as (stub, _):
        models = await stub.ListModels(pb.ListModelsRequest())
    assert models.models == [pb.Model(id=MODEL, max_model_len=model.max_model_len)]


async def test_services_can_be_discovered(model):
    async with (
        serving(model, lambda request: []) as api,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        found = (await call.read()).list_services_response.service
        call.cancel()
    assert {"conductor.v1.Inference", "grpc.health.v1.Health"} <= {service.name for service in found}


ADD = pb.Tool(
    name="add",
    parameters='{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}',
)


def talk(*turns, **fields):
    return {"chat": pb.ChatMessages(messages=[pb.ChatMessage(**turn) for turn in turns], **fields)}


QUESTION_TURN = {"role": "user", "content": "1 + 2?"}
CALLED_TURN = {
    "role": "assistant",
    "tool_calls": [pb.ToolCall(id="c1", name="add", arguments='{"a": 1, "b": 2}')],
}


@pytest.mark.parametrize("per_step", [1, 1000])
async def test_calls_and_reasoning_come_apart_from_the_text(tooled, per_step):
    text = f"<think>Sum.</think>I add.\n{CALL}\n{CALL.replace('2', '3')}"
    said = {"role": "tool", "content": "3", "tool_call_id": "c1"}
    async with calling(tooled, lambda request: spoken(tooled, text, per_step=per_step)) as (stub, api):
        responses = await answer(stub, **talk(QUESTION_TURN, CALLED_TURN, said, tools=[ADD]))
        hidden = await answer(
            stub, **talk(QUESTION_TURN, tools=[ADD], reasoning=pb.Reasoning(is_hidden=True))
        )
    assert "".join(response.text for response in responses) == "I add."
    assert "".join(response.reasoning for response in responses) == "Sum."
    calls = [call for response in responses for call in response.tool_calls]
    assert [(call.name, call.arguments) for call in calls] == [
        ("add", '{"a": 1, "b": 2}'),
        ("add", '{"a": 1, "b": 3}'),
    ]
    assert len({call.id for call in calls}) == 2
    assert responses[-1].finish_reason == "tool_calls"
    assert responses[-1].usage.reasoning_tokens > 0
    assert not any(response.reasoning for response in hidden)
    prompt = prompt_of(tooled, api)
    assert '<tool_call>add({"a": 1, "b": 2})</tool_call><|im_end|>\n<|im_start|>tool\n3<|im_end|>' in prompt


async def test_a_demanded_call_is_a_grammar(tooled):
    said = '[{"name": "add", "arguments": {"a": 1}}]'
    async with calling(tooled, lambda request: spoken(tooled, said)) as (stub, api):
        choice = pb.ToolChoice(mode="required", names=["add"], one_call=True)
        responses = await answer(stub, **talk(QUESTION_TURN, tools=[ADD], tool_choice=choice))
        none = await answer(stub, **talk(QUESTION_TURN, tools=[ADD], tool_choice=pb.ToolChoice(mode="none")))
    (call,) = [call for response in responses for call in response.tool_calls]
    assert (call.name, call.arguments, responses[-1].finish_reason) == ("add", '{"a": 1}', "tool_calls")
    assert "".join(response.text for response in none) == said
    demanded, free = (request.sampling.grammar for request in api.dispatcher.requests)
    assert json.loads(demanded.source)["maxItems"] == 1
    assert free is None


DEEP_TOOL = pb.Tool(name="f", parameters=json.dumps(deep(110)))
BAD_TALKS = {
    "no JSON": (talk(QUESTION_TURN, tools=[pb.Tool(name="f", parameters="{")]), "chat.tools[0].parameters"),
    "no object": (
        talk(QUESTION_TURN, tools=[pb.Tool(name="f", parameters='{"type": "array"}')]),
        "chat.tools[0].parameters.type",
    ),
    "no name": (talk(QUESTION_TURN, tools=[pb.Tool()]), "chat.tools[0].name"),
    "twice": (talk(QUESTION_TURN, tools=[ADD, ADD]), "chat.tools"),
    "deep": (talk(QUESTION_TURN, tools=[DEEP_TOOL]), "chat.tools[0].parameters"),
    "a depth bomb": (
        talk(QUESTION_TURN, tools=[pb.Tool(name="f", parameters="[" * 16_000)]),
        "chat.tools[0].parameters",
    ),
    "many lists": (talk(QUESTION_TURN, tools=[pb.Tool(name="f", parameters="[]," * 30_000)]), "chat.tools"),
    "many tools": (talk(QUESTION_TURN, tools=[ADD] * 1_025), "chat.tools"),
    "a foreign mode": (talk(QUESTION_TURN, tool_choice=pb.ToolChoice(mode="any")), "chat.tool_choice.mode"),
    "a foreign name": (
        talk(QUESTION_TURN, tools=[ADD], tool_choice=pb.ToolChoice(names=["g"])),
        "chat.tool_choice",
    ),
    "no tools": (talk(QUESTION_TURN, tool_choice=pb.ToolChoice(mode="required")), "chat.tool_choice"),
    "a call of the user's": (talk({**CALLED_TURN, "role": "user"}), "chat.messages[0].tool_calls"),
    "bad arguments": (
        talk({"role": "assistant", "tool_calls": [pb.ToolCall(id="c", name="f", arguments="[]")]}),
        "chat.messages[0].tool_calls[0].arguments",
    ),
    "many calls": (
        talk({"role": "assistant", "tool_calls": [pb.ToolCall(id="c", name="f")] * 129}),
        "chat.messages[0].tool_calls",
    ),
    "a result of no call": (
        talk({"role": "tool", "content": "3", "tool_call_id": "c9"}),
        "chat.messages[0].tool_call_id",
    ),
    "variables of no object": (
        talk(QUESTION_TURN, chat_template_kwargs="[1]"),
        "chat.chat_template_kwargs",
    ),
    "many variables": (
        talk(QUESTION_TURN, chat_template_kwargs=json.dumps({f"v{at}": at for at in range(65)})),
        "chat.chat_template_kwargs",
    ),
    "long variables": (
        talk(QUESTION_TURN, chat_template_kwargs=json.dumps({"x": "y" * 200_000})),
        "chat.chat_template_kwargs",
    ),
    "a depth bomb of variables": (
        talk(QUESTION_TURN, chat_template_kwargs='{"x":' * 200 + "1" + "}" * 200),
        "chat.chat_template_kwargs",
    ),
    "many lists of variables": (
        talk(QUESTION_TURN, chat_template_kwargs="[]," * 30_000),
        "chat.chat_template_kwargs",
    ),
    "a reserved variable": (
        talk(QUESTION_TURN, chat_template_kwargs='{"messages": []}'),
        "chat.chat_template_kwargs",
    ),
    "a foreign effort": (talk(QUESTION_TURN, reasoning=pb.Reasoning(effort="some")), "chat.reasoning.effort"),
}


@pytest.mark.parametrize("case", BAD_TALKS)
async def test_bad_tools_are_refused_by_field(tooled, case):
    fields, param = BAD_TALKS[case]
    async with calling(tooled, lambda request: spoken(tooled, "hi")) as (stub, api):
        error, details = await refusal(stub, **fields)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details["BadRequest"].field_violations[0].field == param
    assert not api.dispatcher.requests
