"""A tiny chat model's folder, and a dispatcher that plays a script instead of running it."""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from base.clock import SystemClock
from base.config import ServerConfig, SloConfig
from base.errors import ServeError
from base.metrics import ConductorMetrics, process_registry
from base.prompt_logprobs import PromptLogprobs
from base.request import FinishReason, Request, SampledToken, TokenLogprobs
from conductor.api.completion import Completions
from conductor.api.served_model import ServedModel, load_served_model
from conductor.api.server import Listening, listening
from conductor.serving.generated import Generated

MODEL = "tiny"
MAX_MODEL_LEN = 256
SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """One token for each byte, a few for pairs, and three special ones: ids 0 to 2."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("Ġ", "w"), ("o", "r")]
    words = [*SPECIAL, *alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_model_folder(folder: Path) -> Path:
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    files = {
        "config.json": {"max_position_embeddings": MAX_MODEL_LEN, "vocab_size": 263, "eos_token_id": 0},
        "generation_config.json": {"eos_token_id": [0], "temperature": 0.5, "top_k": 7},
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "model_max_length": 1e30},
    }
    for name, table in files.items():
        (folder / name).write_text(json.dumps(table))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


WAIT = "wait"
"""A step of a script that lasts until the request is cancelled."""

Step = Generated | ServeError | str
Script = Callable[[Request], Sequence[Step]]


class ScriptedDispatcher:
    """Plays the same script for each request, and remembers what happened to it."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.num_open = 0
        self.num_cancelled = 0
        self.is_ready = True
        self._changed = asyncio.Condition()

    async def generate(self, request: Request) -> AsyncGenerator[Generated, None]:
        self.requests.append(request)
        self.num_open += 1
        is_cancelled = True
        try:
            for step in self.script(request):
                # A real one waits for its nodes here, so that requests take turns.
                await asyncio.sleep(0)
                await self._announce()
                if isinstance(step, ServeError):
                    is_cancelled = False
                    raise step
                if isinstance(step, Generated):
                    is_cancelled = step.finish_reason is None
                    yield step
                else:
                    await asyncio.Event().wait()
        finally:
            step = WAIT  # not an error any more: it and this frame would keep each other
            self.num_open -= 1
            self.num_cancelled += is_cancelled
            # Not awaited on: a generator that is being closed may not wait for long.
            await self._announce()

    async def until(self, condition: Callable[[ScriptedDispatcher], bool]) -> None:
        """Return when `condition` holds."""
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: condition(self))

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def spoken(
    model: ServedModel,
    text: str,
    finish: FinishReason = FinishReason.STOP,
    per_step: int = 1,
    num_cached_tokens: int = 0,
    with_logprobs: bool = False,
) -> list[Step]:
    """Return the steps of a model that says `text`, and ends it with its stop token."""
    token_ids = list(model.tokenizer.encode(text, add_special_tokens=False))
    if finish is FinishReason.STOP:
        token_ids.append(model.eos_token_ids[0])
    tokens = [
        SampledToken(token_id, _logprobs(token_id) if with_logprobs else None) for token_id in token_ids
    ]
    steps: list[Step] = []
    for start in range(0, len(tokens), per_step):
        part = tuple(tokens[start : start + per_step])
        is_last = start + per_step >= len(tokens)
        steps.append(Generated(part, finish if is_last else None, num_cached_tokens))
    return steps


def _logprobs(token_id: int) -> TokenLogprobs:
    """The sampled token at -0.5, and ids 100 and 101 as what else was likely."""
    return TokenLogprobs(-0.5, ((100, -0.25), (101, float("-inf"))))


def scored(model: ServedModel, request: Request, text: str) -> list[Step]:
    """Return the steps of a model to which each token of a prompt has minus its place as its logprob."""
    steps = spoken(model, text, FinishReason.LENGTH, with_logprobs=request.num_logprobs is not None)
    if request.num_prompt_logprobs is None:
        return steps
    values = array("f", [-float(at) for at in range(1, len(request.token_ids))])
    top = array("f", [-0.5] * (len(values) * request.num_prompt_logprobs))
    ids = array("I", [100] * len(top))
    found = PromptLogprobs(values.tobytes(), ids.tobytes(), top.tobytes())
    first = steps[0]
    assert isinstance(first, Generated)
    return [first._replace(prompt_logprobs=found), *steps[1:]]


class Api:
    """A conductor that listens, with a scripted dispatcher behind it."""

    def __init__(self, dispatcher: ScriptedDispatcher, completions: Completions, ports: Listening) -> None:
        self.dispatcher = dispatcher
        self.completions = completions
        self.ports = ports

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports.http_port}"

    @property
    def secure_url(self) -> str:
        return f"https://127.0.0.1:{self.ports.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.ports.grpc_port}"

    async def metrics(self) -> str:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            return (await client.get(f"{self.url}/metrics")).text


@asynccontextmanager
async def serving(
    model: ServedModel,
    script: Script,
    max_body_mib: float = 1.0,
    max_calls: int = 64,
    drain_s: float = 5.0,
    slo: SloConfig | None = None,
    **more: Any,
) -> AsyncIterator[Api]:
    """A conductor on free ports, for the length of the body.

    Args:
        more: For `listening`; `server`: keys of its section.
    """
    dispatcher = ScriptedDispatcher(script)
    metrics = ConductorMetrics(process_registry(), MODEL)
    config = ServerConfig(http_port=0, grpc_port=0, max_body_mib=max_body_mib, **more.pop("server", {}))
    completions = Completions(
        model,
        dispatcher,
        metrics,
        SystemClock(),
        max_calls,
        int(max_body_mib * (1 << 20)),
        request_timeout_s=config.request_timeout_s,
    )
    rng = random.Random(1)
    async with listening(completions, config, slo or SloConfig(), rng, drain_s=drain_s, **more) as ports:
        yield Api(dispatcher, completions, ports)


def tiny_model(folder: Path) -> ServedModel:
    return load_served_model(write_model_folder(folder), MODEL)
