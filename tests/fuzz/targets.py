"""What is fuzzed: everything that reads bytes which others wrote.

Each target takes bytes and either returns or raises one of the errors that it may refuse them
with. Anything else is a finding, and so is more work than an input of its size is worth: counted by tests,
measured by the command. A target's seeds are good inputs, made here; inputs that were findings once lie in
`corpus/TARGET/`.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
from google.protobuf.message import DecodeError

from base.block_hash import BlockHash, chain_root
from base.clock import SystemClock
from base.config import NodeProcess, read_process_config
from base.errors import ConfigError, ProtocolError
from base.messages import (
    Heartbeat,
    KvEvents,
    Lend,
    Prefilled,
    Registered,
    Release,
    Reserve,
    Reserved,
    Start,
    Tokens,
    Work,
)
from base.metrics import ConductorMetrics, process_registry
from base.prompt_logprobs import PromptLogprobs
from base.request import RequestId, SampledToken, SamplingParams, Slo, StopParams
from base.wire import (
    add_state,
    from_node,
    from_node_from,
    heartbeat_from,
    kv_events_from,
    lease_from,
    lease_to,
    register,
    register_from,
    to_node,
    to_node_from,
)
from conductor.api.completion import Completions
from conductor.api.http_api import HttpApi
from conductor.api.keys import read_keys
from conductor.replay.trace_formats import read_trace
from deploy.config_file import read_cluster_config
from kvstore.record import HEADER_BYTES, RecordHeader, encode_header, header_or_none
from kvstore.wire import chain_from, member_from_bytes
from protos import nodes_pb2
from tests.conductor.fakes import MODEL, ScriptedDispatcher, spoken, tiny_model
from tests.conductor.scripted_node import GRANT, TIMES, node_info
from transfer.tcp.frame import FrameKind, Header, pack, unpack_header, unpack_ranges

Refusal = type[Exception]


@dataclass(frozen=True, slots=True)
class Target:
    """One reader of foreign bytes."""

    read: Callable[[bytes], object]
    seeds: Sequence[bytes]
    refusals: tuple[Refusal, ...] = ()
    words: tuple[bytes, ...] = ()
    """What a mutation may put in, besides noise."""


JSON_WORDS = (
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'""',
    b"1e999",
    b"-1",
    b"NaN",
    b"9" * 30,
    b'"\\ud800"',
    b"[[[[",
)
YAML_WORDS = (b"&a ", b"*a", b"!!python/object:os.system ", b"? ", b"---\n", b"<<: ", b".inf", b"\t", b"- ")


def _parsed(kind: type, *readers: Callable[..., object]) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        message = kind.FromString(data)
        for reader in readers:
            with suppress(ProtocolError):
                reader(message)

    return read


def _by_file(name: str, reader: Callable[[Path], object]) -> Callable[[bytes], object]:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))

    def read(data: bytes) -> object:
        path = folder / name
        path.write_bytes(data)
        return reader(path)

    return read


WORK = Work(
    RequestId("r"), (1, 2, 3), 3, chain_root("m", "l"), SamplingParams(seed=1), StopParams(5), None, 0, 60.0
)
HASH = BlockHash(bytes(range(16)))


def _node_messages() -> list[bytes]:
    events = KvEvents(1, True, (HASH,), ())
    beat = Heartbeat(1, 2, 3, 4, 5, 6, 7)
    scored = PromptLogprobs(bytes(8), bytes(16), bytes(16))
    prefilled = Prefilled(RequestId("r"), SampledToken(5), None, 0, (1, 2), TIMES, prompt_logprobs=scored)
    said = [Reserved(RequestId("r"), 1, GRANT), prefilled, Tokens(RequestId("r"), (SampledToken(5),), None)]
    step = from_node(said)
    add_state(step, beat, events)
    return [message.SerializeToString() for message in (register(node_info()), step)]


def _conductor_messages() -> list[bytes]:
    for_node = [
        Reserve(WORK),
        Start(RequestId("r"), 5, (1, 2)),
        Release(RequestId("r")),
        Lend(RequestId("r"), (HASH,), 5.0, 0),
    ]
    messages = (to_node(for_node, heartbeat=True), lease_to(Registered(10.0, 2.0, 7)))
    return [message.SerializeToString() for message in messages]


def _frame(data: bytes) -> None:
    head, table = data[: len(FRAME)], data[len(FRAME) :]
    if len(head) == len(FRAME):
        header = unpack_header(head)
        if len(table) >= header.table_bytes:
            unpack_ranges(header, table[: header.table_bytes])


FRAME = pack(Header(FrameKind.WRITE, 1, 64, 2, 3, 4))


class _Api:
    """The application, with a model that says hi; without a socket."""

    def __init__(self) -> None:
        model = tiny_model(Path(tempfile.mkdtemp(prefix="fuzz-")))
        dispatcher = ScriptedDispatcher(lambda request: spoken(model, "hi"))
        completions = Completions(
            model, dispatcher, ConductorMetrics(process_registry(), MODEL), SystemClock(), max_calls=9
        )
        self._loop = asyncio.Runner()
        app = HttpApi(completions, Slo(), 1 << 20, random.Random(1))
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://conductor")

    def post(self, path: str, body: bytes) -> None:
        answer = self._loop.run(self._client.post(path, content=body))
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
        assert answer.status_code == 200 or answer.json()["error"]["message"]


_api = cache(_Api)


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _posted(path: str) -> Callable[[bytes], None]:
    return lambda data: _api().post(path, data)


CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 5,
    "temperature": 0.5,
    "stream": True,
    "stop": ["x"],
}
COMPLETION = {
    "model": "tiny",
    "prompt": [1, 2, 3],
    "max_tokens": 5,
    "n": 2,
    "logprobs": 1,
    "echo": True,
    "seed": 3,
    "logit_bias": {"5": 1.0},
}
CLUSTER = b"""model: smollm2
server: {http_port: 0, host: 127.0.0.1}
prefill:
  nodes: 2
  engine: {block_size: 32}
decode: {engine: {block_size: 32}}
slo: {ttft_s: 1.5}
"""
ROWS = b"""{"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
{"timestamp": 1600, "input_length": 700, "output_length": 3, "hash_ids": [0, 2]}
"""
TABLE = b"Timestamp,Request tokens,Response tokens,Total tokens,Log Type\n5,472,18,490,Conversation log\n"
NODE = {
    "node_id": "n",
    "roles": ["prefill"],
    "model_path": "m",
    "model_id": "i",
    "conductor_addresses": ["a:1"],
    "engine": {},
    "transfer": {"port": 0},
}
KEYS = {
    "tenants": {"a": {"requests_per_s": 5, "burst": 2, "concurrent": 1}},
    "keys": [{"id": "1", "name": "n", "tenant": "a", "sha256": "00" * 32}],
}

TARGETS: dict[str, Target] = {
    "node-message": Target(
        _parsed(nodes_pb2.NodeMessage, register_from, from_node_from, heartbeat_from, kv_events_from),
        _node_messages(),
        (DecodeError,),
    ),
    "conductor-message": Target(
        _parsed(nodes_pb2.ConductorMessage, to_node_from, lease_from), _conductor_messages(), (DecodeError,)
    ),
    "store-member": Target(member_from_bytes, [b"\x0a\x01n\x10\x07"], (DecodeError, ProtocolError)),
    "store-chain": Target(chain_from, [bytes(range(32))], (ProtocolError,)),
    "record": Target(
        header_or_none, [encode_header(RecordHeader(HASH, 4096, 1, 99, 7))[:128], b"\0" * HEADER_BYTES]
    ),
    "frame": Target(
        _frame, [FRAME, pack(Header(FrameKind.READ, 1, 64, 2, 3, 4, 2), b"\1" * 32)], (ProtocolError,)
    ),
    "trace": Target(_by_file("t.jsonl", read_trace), [ROWS], (ConfigError,), JSON_WORDS),
    "trace-table": Target(
        _by_file("t.csv", read_trace), [TABLE], (ConfigError,), (b",", b"\n", b'"', b"1e999", b"-1")
    ),
    "cluster-yaml": Target(
        _by_file("cluster.yaml", read_cluster_config), [CLUSTER], (ConfigError,), YAML_WORDS
    ),
    "node-config": Target(
        _by_file("node.json", lambda path: read_process_config(path, NodeProcess)),
        [_json(NODE)],
        (ConfigError,),
        JSON_WORDS,
    ),
    "keys": Target(_by_file("keys.json", read_keys), [_json(KEYS)], (ConfigError,), JSON_WORDS),
    "chat": Target(_posted("/v1/chat/completions"), [_json(CHAT)], (), JSON_WORDS),
    "completion": Target(_posted("/v1/completions"), [_json(COMPLETION)], (), JSON_WORDS),
    "tokenize": Target(
        _posted("/tokenize"), [b'{"prompt": "hello"}', _json({"messages": CHAT["messages"]})], (), JSON_WORDS
    ),
    "detokenize": Target(_posted("/detokenize"), [b'{"tokens": [1, 2, 3]}'], (), JSON_WORDS),
}
