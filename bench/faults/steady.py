"""A steady load over gRPC and HTTP on a cluster that is hurt, and what its clients saw.

Each client asks, compares the answer with the undisturbed one, and asks again after a pause. An HTTP
client dials anew for each request; where nobody listens, it has not been sent yet and the client dials
again, as a gRPC client does that waits for its connection. Beside them a probe connects
twenty times a second and takes any answer to GET /health.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import secrets
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from bench.faults.asking import CHANNEL_OPTIONS, SMALL_MODEL, Answer, Prompt, ask, drawn_prompts, undisturbed
from protos.inference_pb2_grpc import InferenceStub

CLIENTS = 3
"""The number of clients, over each of gRPC and HTTP, that ask for short answers."""
PROMPTS = 12
DRAWN_FOR_ONE = 2
"""Prompts drawn for each one that is asked; some have answers that depend on the batch."""
TOKENS_OF_PROMPT = (60, 200)
TOKENS_OF_ANSWER = 30
TOKENS_OF_LONG_ANSWER = 1_000
"""Tokens of the answers to one more client over each protocol.

A stream of so many takes seconds, so that one is in progress whenever something is hurt."""
PAUSE_S = 0.2
"""Seconds from an answer to the next request: on a full machine everything would be slow for that alone."""
PATIENCE_S = 180.0
"""Seconds after which a request without an answer has failed, also one that reached nobody.

A long answer takes a minute where the machine is busy."""
DIAL_AGAIN_S = 0.02
PROBE_S = 0.05
PROBE_PATIENCE_S = 1.0
MAX_ERRORS = 5


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that has ended."""

    answer: Answer
    expected: Sequence[int]

    @property
    def differs(self) -> bool:
        """Whether its tokens, as far as they came, are not the undisturbed answer's."""
        expected = self.expected[: len(self.answer.tokens)] if self.answer.error else self.expected
        return list(self.answer.tokens) != list(expected)


@dataclass(slots=True)
class Window:
    """Everything that was seen from one fault to the next."""

    hurt_at_s: float
    until_s: float
    asked: list[Asked]
    answered_at_s: list[float]
    """The moments when probes were answered, each over a connection of its own."""
    dead_at_s: float = 0.0
    """The moment until which requests may have gone to a process that was killed; 0: none was."""
    more: dict[str, Any] = field(default_factory=dict)
    """Figures of this fault alone."""

    @property
    def failed_in_progress(self) -> int:
        """Failed requests that were sent before the fault, or to a process that it killed."""
        failed_at_s = (each.answer.sent_at_s for each in self.asked if each.answer.error)
        return sum(at_s < max(self.hurt_at_s, self.dead_at_s) for at_s in failed_at_s)

    @property
    def failed_afterwards(self) -> int:
        return sum(bool(each.answer.error) for each in self.asked) - self.failed_in_progress

    @property
    def first_tokens_at_s(self) -> list[float]:
        """The moments of the first tokens of requests that were sent after the fault and answered whole."""
        return [
            each.answer.arrived_at_s[0]
            for each in self.asked
            if not each.answer.error and each.answer.sent_at_s >= self.hurt_at_s
        ]

    @property
    def without_answer_s(self) -> float:
        """The longest time in which no new request got its first token."""
        return longest_gap_s(self.first_tokens_at_s, self.hurt_at_s, self.until_s)

    @property
    def without_connection_s(self) -> float:
        return longest_gap_s(self.answered_at_s, self.hurt_at_s, self.until_s)


def longest_gap_s(times_s: Iterable[float], begin_s: float, end_s: float) -> float:
    """Return the longest part of the time from begin to end in which none of `times_s` lies."""
    inside = sorted(at_s for at_s in times_s if begin_s <= at_s <= end_s)
    return max(after - before for before, after in itertools.pairwise([begin_s, *inside, end_s]))


def summed(windows: Sequence[Window]) -> dict[str, Any]:
    """Return the figures of several faults of a kind."""
    asked = [each for window in windows for each in window.asked]
    errors = Counter(each.answer.error for each in asked if each.answer.error)
    without_answer_s = [window.without_answer_s for window in windows]
    without_connection_s = [window.without_connection_s for window in windows]
    return {
        "injected": len(windows),
        "requests": len(asked),
        "failed_in_progress": sum(window.failed_in_progress for window in windows),
        "failed_afterwards": sum(window.failed_afterwards for window in windows),
        "answers_that_differ": sum(each.differs for each in asked),
        "without_new_answer_s_median": round(statistics.median(without_answer_s), 3),
        "without_new_answer_s_max": round(max(without_answer_s), 3),
        "without_connection_s_median": round(statistics.median(without_connection_s), 3),
        "without_connection_s_max": round(max(without_connection_s), 3),
        "longest_gap_s_max": round(
            max((each.answer.longest_gap_s for each in asked if not each.answer.error), default=0.0), 3
        ),
        "errors": dict(errors.most_common(MAX_ERRORS)),
    }


def ask_http(port: int, prompt: Prompt, cache_salt: str = "") -> Answer:
    """Take one streamed completion to its end, or to its error."""
    answer = Answer(time.monotonic())
    body = {
        "model": SMALL_MODEL,
        "prompt": prompt.token_ids,
        "max_tokens": prompt.max_tokens,
        "seed": prompt.seed,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        **({"cache_salt": cache_salt} if cache_salt else {}),
    }
    try:
        connection = _dialled(port, answer.sent_at_s + PATIENCE_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            _read_stream(connection.getresponse(), answer)
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


def _dialled(port: int, until_s: float) -> http.client.HTTPConnection:
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        try:
            connection.connect()
        except ConnectionRefusedError:
            connection.close()
            if time.monotonic() > until_s:
                raise
            time.sleep(DIAL_AGAIN_S)
        else:
            return connection


def _read_stream(response: http.client.HTTPResponse, answer: Answer) -> None:
    """Raise ValueError for anything but a stream that ends as it should."""
    if response.status != 200:
        raise ValueError(f"HTTP {response.status}: {response.read(300).decode(errors='replace')}")
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        if data:
            take_event(answer, json.loads(data))
    raise ValueError("the stream ended without [DONE]")


def take_event(answer: Answer, event: dict[str, Any]) -> None:
    """Add one event's tokens; raises ValueError for an error."""
    if "error" in event:
        raise ValueError(event["error"].get("message", "an error without a message"))
    tokens = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
    if tokens:
        answer.arrived_at_s.append(time.monotonic())
        answer.tokens += tokens


class SteadyLoad:
    """The clients, each a thread, from the first request to `close`."""

    def __init__(self, http_port: int, grpc_address: str, rng: random.Random) -> None:
        """Ask every prompt undisturbed, over gRPC and over HTTP, and begin."""
        self._http_port = http_port
        self._channel = grpc.insecure_channel(grpc_address, CHANNEL_OPTIONS)
        self._stub = InferenceStub(self._channel)
        self._rng = rng
        self._lock = threading.Lock()
        self._asked: list[Asked] = []
        self._sent_at_s: dict[int, float] = {}
        """The moment when each thread sent the request that it waits for."""
        self._answered_at_s: list[float] = []
        self._stopping = threading.Event()
        self._threads = ThreadPoolExecutor(2 * (CLIENTS + 1) + 1)
        long = self._settled(1, drawn_prompts(rng, DRAWN_FOR_ONE, TOKENS_OF_PROMPT, TOKENS_OF_LONG_ANSWER))
        short = self._settled(
            PROMPTS, drawn_prompts(rng, DRAWN_FOR_ONE * PROMPTS, TOKENS_OF_PROMPT, TOKENS_OF_ANSWER)
        )
        self._loops = [self._threads.submit(self._probe)]
        for prompts in [long, *([short] * CLIENTS)]:
            for send in (self._send_grpc, self._send_http):
                self._loops.append(self._threads.submit(self._ask, send, prompts))

    def _settled(self, count: int, drawn: Sequence[Prompt]) -> list[tuple[Prompt, list[int]]]:
        """Return `count` prompts whose answer does not depend on the batch, each with it.

        Where two draws are nearly equal, float32 computed in another batch decides between them. Each prompt
        is asked three times, computed and found, in other company; raises RuntimeError where too few agree.
        """
        asked = [each for each in self._threads.map(self._undisturbed, drawn) if each is not None]
        if len(asked) < count:
            raise RuntimeError(
                f"of {len(drawn)} prompts {len(asked)} have one answer, undisturbed: {count} are wanted"
            )
        return asked[:count]

    def _undisturbed(self, prompt: Prompt) -> tuple[Prompt, list[int]] | None:
        expected = undisturbed(self._stub, prompt)
        for cache_salt in ("", secrets.token_hex(4)):
            answer = self._send_http(prompt, cache_salt)
            if answer.error:
                raise RuntimeError(f"an undisturbed answer over HTTP failed: {answer.error}")
            if answer.tokens != expected:
                return None
        return prompt, expected

    def _send_grpc(self, prompt: Prompt, cache_salt: str) -> Answer:
        return ask(self._stub, prompt.request(cache_salt), PATIENCE_S)

    def _send_http(self, prompt: Prompt, cache_salt: str) -> Answer:
        return ask_http(self._http_port, prompt, cache_salt)

    def _ask(
        self, send: Callable[[Prompt, str], Answer], prompts: Sequence[tuple[Prompt, list[int]]]
    ) -> None:
        while not self._stopping.is_set():
            prompt, expected = self._rng.choice(prompts)
            with self._lock:
                self._sent_at_s[threading.get_ident()] = time.monotonic()
            answer = send(prompt, secrets.token_hex(4) if self._rng.random() < 0.5 else "")
            with self._lock:
                del self._sent_at_s[threading.get_ident()]
                self._asked.append(Asked(answer, expected))
            self._stopping.wait(PAUSE_S)

    def _probe(self) -> None:
        while not self._stopping.wait(PROBE_S):
            connection = http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=PROBE_PATIENCE_S)
            try:
                connection.request("GET", "/health")
                connection.getresponse()
            except (OSError, http.client.HTTPException):
                continue
            finally:
                connection.close()
            with self._lock:
                self._answered_at_s.append(time.monotonic())

    def num_whole(self, sent_after_s: float = 0.0) -> int:
        """Return how many requests, of those not taken yet, were answered whole."""
        with self._lock:
            answers = [each.answer for each in self._asked]
        return sum(not answer.error for answer in answers if answer.sent_at_s >= sent_after_s)

    def has_recovered(self, hurt_at_s: float, count: int, sent_after_s: float = 0.0) -> bool:
        """Return whether all asked before a fault has ended, and `count` requests after it were served."""
        with self._lock:
            old = any(at_s < hurt_at_s for at_s in self._sent_at_s.values())
        return not old and self.num_whole(max(hurt_at_s, sent_after_s)) >= count

    def taken(self, hurt_at_s: float, until_s: float) -> Window:
        """Return what has ended since this was last called."""
        with self._lock:
            asked, self._asked = self._asked, []
            answered_at_s, self._answered_at_s = self._answered_at_s, []
        return Window(hurt_at_s, until_s, asked, answered_at_s)

    def close(self) -> None:
        """Wait for the answers in progress, and end. Idempotent."""
        self._stopping.set()
        for loop in self._loops:
            loop.result()
        self._threads.shutdown()
        self._channel.close()
