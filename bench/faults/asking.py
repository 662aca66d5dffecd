"""Clients that know which tokens must come, and what became of each request.

Every prompt has a seed, and was answered once before anything was hurt. Half of the requests
carry a cache salt that nobody used before, so that their prompts are computed and not found.
"""

from __future__ import annotations

import itertools
import random
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import grpc

from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub

SMALL_MODEL = "small"
"""Name of the model that is asked (`small_model.py`)."""
VOCAB = 512
"""The number of tokens in the asked model's vocabulary."""
TIMEOUT_S = 300.0
CHANNEL_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1_000))


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, and how many tokens are asked for."""

    token_ids: tuple[int, ...]
    max_tokens: int
    seed: int

    def request(self, cache_salt: str = "") -> pb.GenerateRequest:
        return pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=self.token_ids),
            sampling=pb.Sampling(temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0, seed=self.seed),
            stop=pb.Stop(max_tokens=self.max_tokens, ignore_eos=True),
            cache_salt=cache_salt,
        )


def drawn_prompts(rng: random.Random, count: int, length: tuple[int, int], max_tokens: int) -> list[Prompt]:
    """Return prompts of random tokens; those after the first begin like it, some of them."""
    prompts: list[Prompt] = []
    for seed in range(count):
        ids = tuple(rng.randrange(10, VOCAB) for _ in range(rng.randint(*length)))
        if prompts and seed % 3 == 2:
            shared = prompts[0].token_ids[: len(ids) // 2]
            ids = shared + ids[len(shared) :]
        prompts.append(Prompt(ids, max_tokens, seed + 1))
    return prompts


@dataclass(slots=True)
class Answer:
    """The outcome of one request. Seconds of this process's monotonic clock."""

    sent_at_s: float
    tokens: list[int] = field(default_factory=list)
    arrived_at_s: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def longest_gap_s(self) -> float:
        times = [self.sent_at_s, *self.arrived_at_s]
        return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


def ask(stub: InferenceStub, request: pb.GenerateRequest, timeout_s: float = TIMEOUT_S) -> Answer:
    """Take one answer to its end, or to its error."""
    answer = Answer(time.monotonic())
    try:
        # A request waits for a connection: where nobody listens, it has not been sent.
        for response in stub.Generate(request, timeout=timeout_s, wait_for_ready=True):
            answer.arrived_at_s.append(time.monotonic())
            answer.tokens += response.token_ids
    except grpc.RpcError as error:
        answer.error = f"{error.code().name}: {error.details()}"
    return answer


def undisturbed(stub: InferenceStub, prompt: Prompt) -> list[int]:
    """Return the tokens that every later answer must have; raises RuntimeError if there is none."""
    answer = ask(stub, prompt.request())
    # Of one token over and over, a repeated one would not show.
    if answer.error or len(answer.tokens) != prompt.max_tokens or len(set(answer.tokens)) < 4:
        raise RuntimeError(f"an undisturbed answer of {len(answer.tokens)} tokens: {answer.error}")
    return answer.tokens


@dataclass(slots=True)
class Seen:
    """Counts over many answers."""

    requests: int = 0
    failed: int = 0
    wrong_tokens: int = 0
    """Tokens that are not the undisturbed answer's at their position, missing ones too."""
    repeated_tokens: int = 0
    """Tokens beyond the undisturbed answer's length."""
    longest_gap_s: float = 0.0
    """The longest seconds from a request to its first token, or from one token to the next."""
    errors: list[str] = field(default_factory=list)
    """The first few failed answers' errors."""

    def take(self, answer: Answer, expected: Sequence[int]) -> None:
        self.requests += 1
        if answer.error:
            self.failed += 1
            self.errors = [*self.errors, answer.error][:5]
            return
        same = sum(a == b for a, b in zip(answer.tokens, expected, strict=False))
        self.wrong_tokens += len(expected) - same
        self.repeated_tokens += max(0, len(answer.tokens) - len(expected))
        self.longest_gap_s = max(self.longest_gap_s, answer.longest_gap_s)


class Clients:
    """Some clients, each a thread, that ask and compare."""

    def __init__(self, address: str, prompts: Sequence[Prompt], rng: random.Random, count: int = 4) -> None:
        self._channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
        self._stub = InferenceStub(self._channel)
        self._threads = ThreadPoolExecutor(count)
        self._prompts = prompts
        self._rng = rng
        self._count = count
        self._lock = threading.Lock()
        self._expected = list(self._threads.map(partial(undisturbed, self._stub), prompts))
        self.seen = Seen()
        self.first_token_at_s: list[float] = []
        """The moment of each first token, of answers that came whole."""

    def begin(self) -> list[Future[Answer]]:
        """Send one request for each client."""
        return [self._threads.submit(self._one) for _ in range(self._count)]

    def finish(self, asked: list[Future[Answer]]) -> float:
        """Return when the last of them ended."""
        for future in asked:
            future.result()
        return time.monotonic()

    def _one(self) -> Answer:
        number = self._rng.randrange(len(self._prompts))
        salt = secrets.token_hex(4) if self._rng.random() < 0.5 else ""
        answer = ask(self._stub, self._prompts[number].request(salt))
        with self._lock:
            self.seen.take(answer, self._expected[number])
            if not answer.error:
                self.first_token_at_s.append(answer.arrived_at_s[0])
        return answer

    def ask_many(self, count: int) -> list[Future[None]]:
        """Let the clients ask so many requests, each client one after the other; return at once."""
        left = iter(range(count))

        def loop() -> None:
            for _ in left:
                self._one()

        return [self._threads.submit(loop) for _ in range(self._count)]

    def close(self) -> None:
        self._threads.shutdown()
        self._channel.close()
