"""TLS of both listeners: who gets in, what is said of who does not, and renewal."""

import asyncio
import contextlib
import dataclasses
import datetime
import logging
import os
import random
import socket
import ssl
from pathlib import Path

import grpc
import httpx
import pytest
import uvloop

from base.attach import AttachClient
from base.clock import SystemClock
from base.config import NodesConfig, TlsConfig
from base.errors import ConfigError
from base.link import LENGTH_BYTES
from base.messages import Registered
from base.tls import NODE_NAME, Certificates, dialling_context
from base.wire import register
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.profiles.reader import load_profile
from conductor.serving.attach import AttachService
from conductor.serving.membership import Membership
from protos import inference_pb2, inference_pb2_grpc
from tests.certificates import Authority
from tests.conductor.fakes import MODEL, serving, spoken
from tests.conductor.scripted_node import BLOCK_SIZE, MODEL_ID, node_info

CHAT = "/v1/chat/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


class Secure:
    """A conductor with TLS; nodes may attach to it."""

    def __init__(self, model, authority, client_ca="", node_ca=""):
        clock = SystemClock()
        view = ClusterView(CostModel(load_profile("cpu-smollm2")), BLOCK_SIZE)
        self.membership = Membership(MODEL_ID, view, clock)
        self.attach = AttachService(
            self.membership, Registered(10.0, 2.0, 1), clock, nodes_have_certificates=True
        )
        tls = dataclasses.replace(authority.issue("server"), ca=client_ca)
        nodes_tls = authority.issue("node", NODE_NAME)
        nodes_tls = dataclasses.replace(nodes_tls, ca=node_ca or nodes_tls.ca)
        self.listening = serving(
            model,
            lambda request: spoken(model, "hi"),
            server={"tls": tls},
            attach=self.attach.stream,
            nodes=NodesConfig(tls=nodes_tls),
        )

    async def __aenter__(self):
        self.api = await self.listening.__aenter__()
        return self

    async def __aexit__(self, *error):
        for stream in list(self.attach.streams):
            stream.give_up(ConnectionResetError("the conductor ends"))
        await self.listening.__aexit__(*error)

    @property
    def attach_address(self):
        return f"127.0.0.1:{self.api.ports.attach_port}"


def context_of(authority, own=None):
    context = ssl.create_default_context(cafile=authority.path)
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return context


def credentials_of(authority, own=None):
    if own is None:
        return grpc.ssl_channel_credentials(authority.pem)
    return grpc.ssl_channel_credentials(
        authority.pem, Path(own.key).read_bytes(), Path(own.cert).read_bytes()
    )


async def generated(address, credentials):
    async with grpc.aio.secure_channel(address, credentials) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(text="hello", stop=inference_pb2.Stop(max_tokens=4))
        return "".join([part.text async for part in stub.Generate(request, timeout=60)])


async def refused_code(address, credentials):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generated(address, credentials)
    return caught.value.code()


async def test_both_apis_answer_over_tls(model, authority):
    async with Secure(model, authority) as secure:
        async with httpx.AsyncClient(verify=context_of(authority)) as client:
            answer = await client.post(f"{secure.api.secure_url}{CHAT}", json=HELLO)
        credentials = grpc.ssl_channel_credentials(authority.pem)
        assert await generated(secure.api.grpc_address, credentials) == "hi"
    assert answer.json()["choices"][0]["message"]["content"] == "hi"


LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
"""Of the conductor in tests, and in life: each has a TLS of its own."""


@LOOPS
@pytest.mark.parametrize("port", ["http_port", "attach_port"])
def test_connections_that_shake_no_hands_are_bounded_and_the_oldest_makes_room(
    model, authority, monkeypatch, port, run
):
    monkeypatch.setattr("base.arrivals.MAX_CONNECTIONS", 5)

    async def attack():
        async with Secure(model, authority) as secure:
            there = ("127.0.0.1", getattr(secure.api.ports, port))
            silent = [await asyncio.open_connection(*there) for _ in range(50)]
            for reader, _ in silent[:45]:
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), 60) == b""
            if port == "http_port":
                async with httpx.AsyncClient(verify=context_of(authority)) as client:
                    assert (await client.get(f"{secure.api.secure_url}/health")).status_code == 200
            else:
                assert await is_attached(secure, authority.issue("node", NODE_NAME))
            for _, writer in silent:
                writer.close()

    run(attack())


@LOOPS
def test_as_many_connections_as_are_allowed_keep_their_places(model, authority, monkeypatch, run):
    monkeypatch.setattr("base.arrivals.MAX_CONNECTIONS", 3)

    async def fill():
        async with Secure(model, authority) as secure:
            there = ("127.0.0.1", secure.api.ports.http_port)
            opened = [await asyncio.open_connection(*there, ssl=context_of(authority)) for _ in range(3)]
            async with asyncio.timeout(60):
                for reader, writer in opened:
                    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                    assert b"200 OK" in await reader.readuntil(b"}")
            for _, writer in opened:
                writer.close()

    run(fill())


@LOOPS
@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01"])
def test_a_handshake_that_does_not_go_on_ends(model, authority, monkeypatch, said, run):
    monkeypatch.setattr("base.arrivals.HANDSHAKE_TIMEOUT_S", 0.05)

    async def attack():
        async with Secure(model, authority) as secure:
            for port in (secure.api.ports.http_port, secure.api.ports.attach_port):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(said)
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), 60) == b""
                writer.close()

    run(attack())


async def test_plain_text_reaches_nothing(model, authority):
    async with Secure(model, authority) as secure:
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.TransportError):
                await client.post(f"{secure.api.url}{CHAT}", json=HELLO)
        async with grpc.aio.insecure_channel(secure.api.grpc_address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await inference_pb2_grpc.InferenceStub(channel).ListModels(
                    inference_pb2.ListModelsRequest(), timeout=60
                )
        assert not secure.api.dispatcher.requests


def strangers(authority, folder):
    """Clients' certificates that are not good, and none at all."""
    other = Authority(folder / "other", "other")
    return {
        "none": None,
        "another authority's": other.issue("client"),
        "expired": authority.issue("late", end=datetime.datetime(2021, 1, 1)),
    }


async def test_clients_certificates_are_checked_where_there_is_an_authority(model, authority, tmp_path):
    async with Secure(model, authority, client_ca=authority.path) as secure:
        url = f"{secure.api.secure_url}/health"
        async with httpx.AsyncClient(verify=context_of(authority, authority.issue("client"))) as client:
            assert (await client.get(url)).status_code == 200
        good = credentials_of(authority, authority.issue("client"))
        assert await generated(secure.api.grpc_address, good) == "hi"
        for own in strangers(authority, tmp_path).values():
            async with httpx.AsyncClient(verify=context_of(authority, own)) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get(url)
            credentials = credentials_of(authority, own)
            assert await refused_code(secure.api.grpc_address, credentials) == grpc.StatusCode.UNAVAILABLE


async def test_failed_handshake_is_named_in_the_log_and_not_to_the_peer(model, authority, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "base.arrivals")
    async with Secure(model, authority, client_ca=authority.path) as secure:
        for own in strangers(authority, tmp_path).values():
            async with httpx.AsyncClient(verify=context_of(authority, own)) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get(f"{secure.api.secure_url}/health")
        with socket.create_connection(("127.0.0.1", secure.api.ports.http_port), timeout=60) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            said = await asyncio.to_thread(plain.recv, 1000)
        assert b"HTTP" not in said
    told = [record.getMessage() for record in caplog.records if "handshake failed" in record.getMessage()]
    assert any("did not return a certificate" in line for line in told)
    assert any("unable to get local issuer" in line for line in told)
    assert any("certificate has expired" in line for line in told)
    assert any("http request" in line.lower() for line in told)


@LOOPS
@pytest.mark.parametrize("port", ["http_port", "attach_port"])
def test_failed_handshakes_have_a_line_together(model, authority, caplog, port, run):
    caplog.set_level(logging.WARNING, "base.arrivals")

    async def attack():
        async with Secure(model, authority) as secure:
            for _ in range(50):
                reader, writer = await asyncio.open_connection("127.0.0.1", getattr(secure.api.ports, port))
                writer.write(b"GET /health HTTP/1.1\r\n\r\n")
                with contextlib.suppress(ConnectionError):
                    await asyncio.wait_for(reader.read(), 60)
                writer.close()

    run(attack())
    assert len([record for record in caplog.records if record.name == "base.arrivals"]) == 1


class Idle:
    """A node with nothing to say."""

    def receive(self, items):
        pass

    def heartbeat(self):
        return None

    def kv_events(self):
        return None

    kv_snapshot = kv_events

    def attached(self, lease):
        pass

    def lost(self):
        pass


class LossNoted(logging.Handler):
    """Says when a node logs that it has lost its conductor, which it does for each refusal."""

    def __init__(self, noted):
        super().__init__(logging.WARNING)
        self.emit = lambda record: noted.set()


async def is_attached(secure, tls):
    """Return whether a node is a member after its first try."""
    return await dials(secure, dialling_context(tls, "tls"))


async def dials(secure, secured):
    client = AttachClient(node_info(), secure.attach_address, random.Random(0), secured)
    ended = asyncio.Event()
    secure.membership.on_change(ended.set)
    handler, log = LossNoted(ended), logging.getLogger("base.attach")
    log.addHandler(handler)
    task = asyncio.create_task(client.run(Idle()))
    try:
        await ended.wait()
        return bool(secure.membership.sessions)
    finally:
        log.removeHandler(handler)
        task.cancel()
        await asyncio.wait([task])


async def test_a_node_attaches_by_its_certificate(model, authority):
    async with Secure(model, authority) as secure:
        assert await is_attached(secure, authority.issue("node", NODE_NAME))


async def test_a_clients_certificate_does_not_attach(model, authority, caplog):
    caplog.set_level(logging.WARNING, "base.attach")
    async with Secure(model, authority) as secure:
        assert not await is_attached(secure, authority.issue("client"))
    assert any("ForbiddenError: only a node may attach" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("who", ["nobody", "of another authority", "without TLS"])
async def test_who_shows_no_good_certificate_does_not_attach(model, authority, tmp_path, who):
    stranger = Authority(tmp_path / "other", "other").issue("node", NODE_NAME)
    async with Secure(model, authority) as secure:
        context = context_of(authority, stranger if who == "of another authority" else None)
        heard = await asyncio.to_thread(heard_after_registering, secure, None if "out" in who else context)
        assert not heard
        assert not secure.membership.sessions


def heard_after_registering(secure, context):
    """Dial by hand, register as a node, and return what is answered."""
    message = register(node_info()).SerializeToString()
    port = secure.api.ports.attach_port
    with contextlib.suppress(ssl.SSLError, ConnectionError), contextlib.ExitStack() as opened:
        link = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        if context is not None:
            link = opened.enter_context(context.wrap_socket(link, server_hostname="127.0.0.1"))
        link.sendall(len(message).to_bytes(LENGTH_BYTES, "little") + message)
        return link.recv(1000)
    return b""


async def test_a_node_does_not_talk_to_a_conductor_of_another_authority(model, authority, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "base.attach")
    own = Authority(tmp_path / "other", "other").issue("node", NODE_NAME)
    async with Secure(model, authority) as secure:
        assert not await is_attached(secure, own)
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text


async def test_a_renewed_certificate_is_shown_without_a_restart(model, authority):
    def shown(port):
        context = context_of(authority, authority.issue("client"))
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
        ):
            return dict(secured.getpeercert()["subject"][0])["commonName"]

    async with Secure(model, authority) as secure:
        ports = (secure.api.ports.http_port, secure.api.ports.grpc_port, secure.api.ports.attach_port)
        assert [await asyncio.to_thread(shown, port) for port in ports] == ["server"] * 3
        renewed = authority.issue("renewed")
        folder = Path(renewed.cert).parent
        for new, old in ((renewed.key, "server.key"), (renewed.cert, "server.pem")):
            os.replace(new, folder / old)
        assert [await asyncio.to_thread(shown, port) for port in ports] == ["renewed"] * 3
        # A broken file leaves the last good one in use.
        (folder / "server.pem").write_text("nothing")
        assert [await asyncio.to_thread(shown, port) for port in ports] == ["renewed"] * 3


async def test_an_authority_that_is_taken_away_opens_nothing_any_more(model, authority, tmp_path):
    """Certificates are not revoked one by one, so this is how their owners are locked out."""
    other = Authority(tmp_path / "other", "other")
    old, new = authority.issue("old", NODE_NAME), other.issue("new", NODE_NAME)
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.pem)

    async def let_in(own):
        client = dataclasses.replace(own, ca=authority.path)
        async with httpx.AsyncClient(verify=context_of(authority, own)) as asking:
            try:
                over_http = (await asking.get(f"{secure.api.secure_url}/health")).is_success
            except httpx.TransportError:
                over_http = False
        try:
            over_grpc = await generated(secure.api.grpc_address, credentials_of(authority, own)) == "hi"
        except grpc.aio.AioRpcError:
            over_grpc = False
        return over_http, over_grpc, await is_attached(secure, client)

    async with Secure(model, authority, client_ca=str(trusted), node_ca=str(trusted)) as secure:
        assert (await let_in(old), await let_in(new)) == ((True,) * 3, (False,) * 3)
        trusted.with_suffix(".new").write_bytes(other.pem)
        os.replace(trusted.with_suffix(".new"), trusted)
        assert (await let_in(old), await let_in(new)) == ((False,) * 3, (True,) * 3)


async def test_a_node_dials_with_the_certificate_that_its_files_have_by_then(model, authority, tmp_path):
    """One that is renewed while its node is attached is shown when the conductor has started again."""
    own = Authority(tmp_path / "other", "other").issue("node", NODE_NAME)
    dialling = dialling_context(dataclasses.replace(own, ca=authority.path), "tls")
    async with Secure(model, authority) as secure:
        assert not await dials(secure, dialling)
        renewed = authority.issue("renewed", NODE_NAME)
        for new, old in ((renewed.key, own.key), (renewed.cert, own.cert)):
            os.replace(new, old)
        assert await dials(secure, dialling)


@pytest.mark.parametrize(
    ("field", "content", "told"),
    [
        ("cert", None, r"tls\.cert: .*: No such file"),
        ("key", None, r"tls\.key: .*: No such file"),
        ("ca", None, r"tls\.ca: .*: No such file"),
        ("cert", "garbage", r"tls\.cert: .*: no CERTIFICATE"),
        ("key", "garbage", r"tls\.key: .*: no PRIVATE KEY"),
        ("ca", "garbage", r"tls\.ca: .*: no CERTIFICATE"),
        ("key", "another", r"tls\.key: .*: it is not the key of tls\.cert"),
        ("key", "-----BEGIN ENCRYPTED PRIVATE KEY-----", r"tls\.key: .*: it is encrypted"),
        ("ca", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", r"tls\.ca: "),
    ],
)
def test_a_file_that_is_wrong_is_named_with_its_key(authority, tmp_path, field, content, told):
    good = authority.issue("server")
    path = tmp_path / "wrong"
    if content == "another":
        path = Path(authority.issue("another").key)
    elif content is not None:
        path.write_text(content)
    tls = TlsConfig(**{**dataclasses.asdict(good), field: str(path)})
    for use in (Certificates, dialling_context):
        with pytest.raises(ConfigError, match=told):
            use(tls, "tls")
