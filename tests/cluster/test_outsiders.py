"""An outsider and a foreign tenant, on every port that the processes of a guarded cluster have.

What each port is, is not asked: all that an outsider can say is said to all of them. A control beside each
kind of attack shows that it succeeds for who has what the outsider lacks.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from base.block_hash import chain_root, hash_chain
from base.checksum import CHECKSUM_KIND
from base.kv_layout import head_layout
from base.link import LENGTH_BYTES
from base.tls import NODE_NAME
from conductor.api.web_page import MODULES
from protos import kvstore_pb2, nodes_pb2
from protos.inference_pb2_grpc import InferenceStub
from protos.kvstore_pb2_grpc import KvStoreStub
from tests.certificates import Authority
from tests.cluster.asking import PATIENCE_S, generate_request, until
from tests.cluster.fortress import BLOCK_SIZE, Fortress, fortress
from tests.deploy.processes import listening, receiving
from tests.every_method import every_method, filled
from transfer.tcp.frame import HEADER_BYTES, FrameKind, Header, pack, unpack_header
from transfer.tcp.greeting import Nonces, proof

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

LAYOUT = head_layout(num_layers=30, num_heads=3, head_dim=64, block_size=BLOCK_SIZE, dtype="float32")
LENGTH = 100
FULL_BLOCKS = LENGTH // BLOCK_SIZE
PROMPT = list(range(1000, 1000 + LENGTH))
REQUEST_ID = "the-victims-request"
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
OPEN_PATHS = {
    "/",
    "/health",
    "/openapi.json",
    "/ui",
    "/ui/style.css",
    *(f"/ui/{name}.js" for name in MODULES),
}
OPEN_METHODS = {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
TENANTS_METHODS = {
    "/conductor.v1.Inference/ListModels",
    *(f"/inference.GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady", "ServerMetadata")),
    "/inference.GRPCInferenceService/ModelReady",
}
"""What a tenant with a key is answered, whatever the message: the model that all are served, and no more."""
NUM_SILENT = 40
"""Connections to each port, which fit into a test's descriptors, and are more than a metrics port has."""
READ_S = 1.0
"""For an answer to bytes that most ports answer with nothing."""


def prompt(number: int) -> list[int]:
    """Return one of many prompts, of which no two share a block."""
    return list(range(2000 + LENGTH * number, 2000 + LENGTH * (number + 1)))


@pytest.fixture(scope="module")
def fort(smollm2, tmp_path_factory) -> Iterator[Fortress]:
    with fortress(smollm2, tmp_path_factory.mktemp("fortress")) as started:
        yield started


def asked(fort: Fortress, tenant: str, token_ids: list[int], **fields: Any) -> tuple[list[int], int]:
    """Return the tokens of a greedy answer over gRPC, and how many of the prompt's were cached."""
    metadata = [("authorization", f"Bearer {fort.keys[tenant]}"), *fields.pop("metadata", ())]
    tokens, cached = [], -1
    with grpc.secure_channel(fort.cluster.grpc_address, fort.credentials()) as channel:
        request = generate_request(token_ids, 8, **fields)
        for part in InferenceStub(channel).Generate(request, timeout=PATIENCE_S, metadata=metadata):
            tokens += part.token_ids
            if part.finish_reason:
                cached = part.usage.cached_tokens
    return tokens, cached


def chain_of(fort: Fortress, token_ids: list[int], tenant: str, salt: str = "") -> bytes:
    root = chain_root(fort.model_id, f"{LAYOUT.layout_id}/checksum={CHECKSUM_KIND}", tenant, salt)
    return b"".join(hash_chain(token_ids, BLOCK_SIZE, root))


def shows_all(counted: dict[str, float]) -> bool:
    """Return whether stores show what engines have saved: their gauges are set once a second."""
    saved = sum(value for name, value in counted.items() if 'kvstore_engine_blocks{what="saved"}' in name)
    places = (
        'kvstore_tier_blocks{place="cached",tier="host"}',
        'kvstore_tier_blocks{place="held",tier="host"}',
    )
    return saved == sum(value for name, value in counted.items() if name.endswith(places))


def settle(fort: Fortress, tenant: str, token_ids: list[int], salt: str = "") -> None:
    """Wait until both engines have saved a prompt that was asked, so that nothing more changes by itself."""
    request = kvstore_pb2.Chain(hashes=chain_of(fort, token_ids, tenant, salt))
    for member in fort.members():
        if member.node_id != fort.storage["node_id"]:
            with grpc.secure_channel(member.address, fort.credentials(fort.node)) as channel:
                match = KvStoreStub(channel).Match
                until(lambda match=match: match(request, timeout=PATIENCE_S).num_blocks == FULL_BLOCKS)


@pytest.fixture(scope="module")
def victim(fort) -> tuple[list[int], int]:
    """What the victim's prompt is answered with once it is in a store."""
    asked(fort, "victim", PROMPT, request_id=REQUEST_ID)
    settle(fort, "victim", PROMPT)
    return asked(fort, "victim", PROMPT)


@pytest.fixture
def unharmed(fort, victim) -> Iterator[None]:
    """The cluster counts nothing of the test's attacks, nobody leaves, and the victim's answer stays."""
    until(lambda: shows_all(fort.counted()))
    nodes, counted = fort.nodes(), fort.counted()
    yield
    assert fort.nodes() == nodes
    assert fort.counted() == counted
    assert victim[1] == FULL_BLOCKS * BLOCK_SIZE
    assert asked(fort, "victim", PROMPT) == victim


def secrets_of(fort: Fortress) -> list[bytes]:
    """Return what no outsider may hear of."""
    epochs = [int(epoch, 16) for epoch in fort.nodes().values()]
    told = [*fort.keys.values(), "victim", REQUEST_ID, *map(str, epochs), *(f"{epoch:x}" for epoch in epochs)]
    binary = [epoch.to_bytes(8, order) for epoch in epochs for order in ("little", "big")]
    binary += [member.peer.secret for member in fort.members()]
    return [text.encode() for text in told] + binary


def shown(fort: Fortress, folder) -> dict[str, ssl.SSLContext | None]:
    """Return what an outsider may dial with, by who it is then."""
    stranger = Authority(folder / "stranger", "stranger").issue("node", NODE_NAME)
    own = fort.authority.issue("client")
    return {
        "plain": None,
        "nobody": fort.context(),
        "stranger": fort.context(stranger),
        "client": fort.context(own),
    }


def said_by_hand(fort: Fortress) -> dict[str, bytes]:
    register = filled(nodes_pb2.Register.DESCRIPTOR, "prefill-0", b"1" * 16)
    message = nodes_pb2.NodeMessage(register=register).SerializeToString()
    hello = pack(Header(FrameKind.HELLO, generation=1, offset=2))
    epoch = fort.members()[0].epoch
    return {
        "nothing": b"",
        "zeros": bytes(4096),
        "noise": bytes(range(256)) * 16,
        "http": b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        "status": b"GET /status HTTP/1.1\r\nHost: x\r\nX-Tenant-Id: operator\r\n\r\n",
        "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]),
        "register": len(message).to_bytes(LENGTH_BYTES, "little") + message,
        "hello": hello,
        "read": hello + pack(Header(FrameKind.READ, 1, 64, 1, 1)),
        "no proof": hello + pack(Header(FrameKind.PROOF)) + pack(Header(FrameKind.READ, 1, 64, 1, 1)),
        "right epoch": hello + pack(proof(FrameKind.PROOF, b"", epoch, Nonces((1, 2), (0, 0)))),
        "wrong epoch": hello + pack(proof(FrameKind.PROOF, b"", epoch + 1, Nonces((1, 2), (0, 0)))),
    }


def heard(port: int, said: bytes, context: ssl.SSLContext | None) -> bytes:
    """Dial, say it, and return all that is answered within a while."""
    answer = bytearray()
    with ExitStack() as opened, suppress(OSError):
        link = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=READ_S))
        if context is not None:
            link = opened.enter_context(context.wrap_socket(link, server_hostname="127.0.0.1"))
        link.sendall(said)
        while part := link.recv(1 << 16):
            answer += part
    return bytes(answer)


def test_nothing_listens_beyond_loopback_or_for_datagrams(fort):
    assert {host for host, _ in listening(fort.pids())} <= LOOPBACK
    assert receiving(fort.pids()) == []
    told = fort.cluster.ready["conductor"]
    known = {told["http_port"], told["grpc_port"], told["attach_port"], *fort.metrics_ports()}
    stores = {int(member.address.rpartition(":")[2]) for member in fort.members()}
    data = {int(member.peer.endpoints[0].address.rpartition(":")[2]) for member in fort.members()}
    assert set(fort.ports()) == known | stores | data
    assert (len(stores), len(data)) == (3, 3)


def test_bytes_of_an_outsider_get_nothing_from_any_port(fort, unharmed, tmp_path):
    contexts, says, secrets = shown(fort, tmp_path), said_by_hand(fort), secrets_of(fort)
    attacks = [(port, who, what) for port in fort.ports() for who in contexts for what in says]
    with ThreadPoolExecutor(32) as pool:
        answers = pool.map(lambda attack: heard(attack[0], says[attack[2]], contexts[attack[1]]), attacks)
        for attack, answer in zip(attacks, answers, strict=True):
            assert not [secret for secret in secrets if secret in answer], attack
            assert b" 200 OK" not in answer or attack[0] in fort.metrics_ports(), attack
    for port in set(fort.ports()) - set(fort.metrics_ports()):
        right, wrong = (heard(port, says[f"{epoch} epoch"], None) for epoch in ("right", "wrong"))
        assert right[HEADER_BYTES:] == wrong[HEADER_BYTES:], "a guess of the epoch is told right from wrong"


def test_connections_that_say_nothing_keep_nobody_out(fort, unharmed):
    with ExitStack() as opened:
        for port in fort.ports():
            for _ in range(NUM_SILENT):
                opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
        assert fort.get("/status").status_code == 200
        assert fort.counted()
        with grpc.secure_channel(fort.cluster.grpc_address, fort.credentials()) as channel:
            asking = health_pb2.HealthCheckRequest()
            assert health_pb2_grpc.HealthStub(channel).Check(asking, timeout=PATIENCE_S).status


def credentials(fort: Fortress, folder) -> dict[str, grpc.ChannelCredentials | None]:
    stranger = Authority(folder / "stranger", "stranger").issue("node", NODE_NAME)
    issued = {"nobody": None, "stranger": stranger, "client": fort.authority.issue("client")}
    return {"plain": None, **{who: fort.credentials(own) for who, own in issued.items()}}


CLAIMS: dict[str, tuple[tuple[str, str], ...]] = {
    "no key": (),
    "a wrong key": (("authorization", "Bearer ck-00000000-nothing"),),
    "a name": (("x-tenant-id", "victim"),),
}


def called(
    address: str,
    shows: grpc.ChannelCredentials | None,
    claims: dict[str, tuple[tuple[str, str], ...]],
    data: bytes,
) -> dict[tuple[str, str], tuple[str, bytes]]:
    """Call every method with every claim; return the status of each and all that it was told."""
    found = {}
    opened = grpc.insecure_channel(address) if shows is None else grpc.secure_channel(address, shows)
    with opened as channel:
        for name, method in every_method():
            request = filled(method.input_type, "conductor.v1.Inference", data).SerializeToString()
            for claim, metadata in claims.items():
                call = channel.stream_stream(name)(iter([request]), timeout=PATIENCE_S, metadata=metadata)
                answer = bytearray()
                try:
                    answer += next(call)
                    status = "OK"
                    call.cancel()
                except (grpc.RpcError, StopIteration):
                    status = call.code().name
                    answer += (call.details() or "").encode()
                    answer += repr(call.trailing_metadata()).encode()
                found[name, claim] = status, bytes(answer)
    return found


def test_every_method_of_every_service_is_closed_to_an_outsider_on_every_port(fort, unharmed, tmp_path):
    who, secrets, data = credentials(fort, tmp_path), secrets_of(fort), chain_of(fort, PROMPT, "victim")
    attacks = [(port, name) for port in fort.ports() for name in who]
    with ThreadPoolExecutor(8) as pool:
        told = pool.map(
            lambda attack: called(f"127.0.0.1:{attack[0]}", who[attack[1]], CLAIMS, data), attacks
        )
        for (port, name), answers in zip(attacks, told, strict=True):
            for (method, claim), (status, answer) in answers.items():
                is_open = port == fort.cluster.ready["conductor"]["grpc_port"] and name != "plain"
                expected = is_open and method in OPEN_METHODS
                assert (status == "OK") == expected, (port, name, method, claim, status)
                assert not [secret for secret in secrets if secret in answer], (port, name, method, claim)


def routes(fort: Fortress) -> set[str]:
    described = httpx.get(f"{fort.url}/openapi.json", verify=fort.context(), timeout=PATIENCE_S).json()
    known = {path.replace("{name}", REQUEST_ID) for path in described["paths"]}
    guessed = {"responses", "batches", "files", "threads", "conversations", "messages", "links", "embeddings"}
    reports = {
        "/status",
        "/metrics",
        "/v1/explain",
        f"/v1/explain/{REQUEST_ID}",
        "/v1/links/prefill-0",
        "/v1/page/now",
        "/v1/replay",
    }
    return known | reports | OPEN_PATHS | {"/docs"} | {f"/v1/{name}/{REQUEST_ID}" for name in guessed}


def test_every_route_is_closed_to_an_outsider(fort, unharmed, tmp_path):
    secrets, paths = secrets_of(fort), sorted(routes(fort))
    for context in (fort.context(), fort.context(fort.authority.issue("client"))):
        with httpx.Client(base_url=fort.url, verify=context, timeout=PATIENCE_S) as client:
            for claim in CLAIMS.values():
                for path in paths:
                    for method in ("GET", "POST", "DELETE"):
                        answer = client.request(method, path, headers=dict(claim))
                        where = (method, path, claim)
                        assert (answer.status_code != 401) == (path in OPEN_PATHS), where
                        assert not [secret for secret in secrets if secret in answer.content], where


def test_a_greeting_that_was_recorded_opens_no_data_port(fort, unharmed):
    for member in fort.members():
        port = int(member.peer.endpoints[0].address.rpartition(":")[2])
        hello, read = (
            pack(Header(FrameKind.HELLO, generation=1, offset=2)),
            pack(Header(FrameKind.READ, 1, 64, 1, 1)),
        )
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as link:
            link.sendall(hello)
            challenge = unpack_header(link.recv(HEADER_BYTES, socket.MSG_WAITALL))
            nonces = Nonces((1, 2), (challenge.generation, challenge.offset))
            recorded = pack(proof(FrameKind.PROOF, member.peer.secret, member.epoch, nonces))
            link.sendall(recorded)
            assert unpack_header(link.recv(HEADER_BYTES, socket.MSG_WAITALL)).kind is FrameKind.WELCOME
        answer = heard(port, hello + recorded + read, None)
        kinds = [
            unpack_header(answer[:HEADER_BYTES]).kind,
            unpack_header(answer[HEADER_BYTES:][:HEADER_BYTES]).kind,
        ]
        assert kinds == [FrameKind.CHALLENGE, FrameKind.REFUSED]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"metadata": [("x-tenant-id", "victim")]},
        {"cache_salt": "victim"},
        {"request_id": REQUEST_ID},
    ],
)
def test_a_right_guess_of_anothers_prompt_costs_and_says_what_a_wrong_one_does(fort, fields):
    number = next(fort.numbers)
    guessed, other = prompt(2 * number), prompt(2 * number + 1)
    asked(fort, "victim", guessed)
    settle(fort, "victim", guessed)
    found = []
    for token_ids in (guessed, other):
        before = fort.counted()
        tokens, cached = asked(fort, "foreign", token_ids, **fields)
        until(lambda before=before: moved(fort, before)["computed"] >= LENGTH)
        settle(fort, "foreign", token_ids, fields.get("cache_salt", ""))
        found.append((len(tokens) > 0, cached, moved(fort, before)))
    assert found[0] == found[1] == (True, 0, {"computed": LENGTH, "matched": 0.0, "loaded": 0.0})
    assert asked(fort, "victim", guessed)[1] == FULL_BLOCKS * BLOCK_SIZE


def moved(fort: Fortress, before: dict[str, float]) -> dict[str, float]:
    """Return how many tokens were computed and matched, and blocks loaded, since `before`, by all nodes."""
    rows = {
        "computed": 'prefill_tokens_total{source="computed"}',
        "matched": 'prefill_tokens_total{source="matched"}',
        "loaded": 'kvstore_engine_blocks{what="loaded"}',
    }
    now = fort.counted()
    return {
        name: sum(value - before.get(key, 0.0) for key, value in now.items() if key.endswith(row))
        for name, row in rows.items()
    }


def test_a_foreign_tenants_http_answers_are_alike_too(fort):
    number = next(fort.numbers)
    guessed, other = prompt(2 * number), prompt(2 * number + 1)
    asked(fort, "victim", guessed)
    settle(fort, "victim", guessed)
    told = []
    for token_ids in (guessed, other):
        body = {"model": "smollm2", "prompt": token_ids, "max_tokens": 4, "temperature": 0, "user": "victim"}
        headers = {**fort.bearer("foreign"), "x-tenant-id": "victim", "x-request-id": REQUEST_ID}
        answer = httpx.post(
            f"{fort.url}/v1/completions", json=body, headers=headers, verify=fort.context(), timeout=300
        )
        settle(fort, "foreign", token_ids)
        usage = answer.json()["usage"]
        told.append(
            (
                answer.status_code,
                sorted(answer.headers),
                sorted(answer.json()),
                usage["prompt_tokens_details"],
            )
        )
    assert told[0] == told[1]
    assert told[0][3] == {"cached_tokens": 0}


def test_a_foreign_tenant_learns_nothing_of_anothers_requests_or_the_cluster(fort, unharmed):
    closed = sorted(path for path in routes(fort) if fort.get(path, "foreign").status_code == 403)
    assert {"/status", "/metrics", "/v1/explain", f"/v1/explain/{REQUEST_ID}", "/v1/links/prefill-0"} <= set(
        closed
    )
    for path in closed:
        wrong = path.replace(REQUEST_ID, "nobodys").replace("prefill-0", "nobody")
        assert fort.get(path, "foreign").content == fort.get(wrong, "foreign").content
    secrets = [secret for secret in secrets_of(fort) if secret != fort.keys["foreign"].encode()]
    for path in routes(fort) - set(closed):
        content = fort.get(path, "foreign").content.replace(REQUEST_ID.encode(), b"")
        assert not [secret for secret in secrets if secret in content], path
    answers = called(
        fort.cluster.grpc_address,
        fort.credentials(fort.authority.issue("client")),
        {"a key": (("authorization", f"Bearer {fort.keys['foreign']}"),)},
        b"x",
    )
    reached = {method for (method, _), (status, _) in answers.items() if status == "OK"}
    assert reached == OPEN_METHODS | TENANTS_METHODS


def test_a_request_of_anothers_id_is_another_request(fort, victim):
    with ThreadPoolExecutor(2) as pool:
        answers = [
            pool.submit(asked, fort, who, PROMPT, request_id=REQUEST_ID) for who in ("victim", "foreign")
        ]
        mine, theirs = (answer.result() for answer in answers)
    assert mine == victim
    assert theirs[0] == victim[0]
