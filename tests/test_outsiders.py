"""Every gRPC method of the descriptors, called by every kind of caller, at every server there is.

The table says who is let in; a method that stands nowhere in it fails, so a new one has to be given a rule.
A real cluster is attacked in `tests/cluster/test_outsiders.py`, routes in
`tests/conductor/api/test_access.py`.
"""

from contextlib import asynccontextmanager

import grpc
import pytest

from base.config import TlsConfig
from base.tls import NODE_NAME, dialling_credentials
from conductor.api.served_model import ServedModel
from tests.certificates import Authority
from tests.conductor.api.test_access import Keys
from tests.conductor.fakes import serving, spoken, tiny_model
from tests.every_method import every_method, filled
from tests.kvstore.cluster import chain_of, save
from tests.kvstore.test_store_port import hosted

TENANTS, OPERATORS, NODES, ALL = {"tenant", "operator"}, {"operator"}, {"node"}, {"everybody"}
LET_IN = {
    "conductor": {
        "/conductor.v1.Inference/Generate": TENANTS,
        "/conductor.v1.Inference/Embed": TENANTS,
        "/conductor.v1.Inference/ListModels": TENANTS,
        "/inference.GRPCInferenceService/ServerLive": TENANTS,
        "/inference.GRPCInferenceService/ServerReady": TENANTS,
        "/inference.GRPCInferenceService/ModelReady": TENANTS,
        "/inference.GRPCInferenceService/ServerMetadata": TENANTS,
        "/inference.GRPCInferenceService/ModelMetadata": TENANTS,
        "/inference.GRPCInferenceService/ModelInfer": TENANTS,
        "/grpc.health.v1.Health/Check": ALL,
        "/grpc.health.v1.Health/Watch": ALL,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": OPERATORS,
    },
    "store": {
        "/conductor.v1.KvStore/Match": NODES,
        "/conductor.v1.KvStore/Reserve": NODES,
        "/conductor.v1.KvStore/Commit": NODES,
        "/conductor.v1.KvStore/Abort": NODES,
        "/conductor.v1.KvStore/Lease": NODES,
        "/conductor.v1.KvStore/Release": NODES,
        "/conductor.v1.KvStore/Delete": NODES,
        "/conductor.v1.KvStore/Report": NODES,
        "/grpc.health.v1.Health/Check": NODES,
        "/grpc.health.v1.Health/Watch": NODES,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": NODES,
    },
}
"""By server and method. What a server does not have, it has for nobody."""
KEPT_OUT = {"UNAUTHENTICATED", "PERMISSION_DENIED", "NO CONNECTION"}
CALLS = 5
OF_THE_CLIENT = "Internal error from Core"
"""What gRPC's client says of itself where a connection broke under a call that it was sending."""
SERVICE = "conductor.v1.Inference"
METHODS = [name for name, _ in every_method()]


def test_every_method_has_a_rule():
    assert set(METHODS) == {method for rules in LET_IN.values() for method in rules}


class Callers:
    """Who calls: how each dials, and what it says of itself."""

    def __init__(self, folder):
        self.keys = Keys(folder)
        ours, other = Authority(folder / "ours"), Authority(folder / "other", "other")
        self.server, self.node = ours.issue("server", ca=False), ours.issue("node", NODE_NAME)
        stranger = other.issue("node", NODE_NAME)
        stranger = TlsConfig(stranger.cert, stranger.key, ours.path)
        nobody = grpc.ssl_channel_credentials(ours.pem)
        client = dialling_credentials(ours.issue("client"), "tls")()
        named = (("x-tenant-id", "operator"), ("x-forwarded-client-cert", NODE_NAME))
        self.dialled = {
            "plain": (None, self.keys.metadata("operator")),
            "nobody": (nobody, ()),
            "a name": (nobody, named),
            "a wrong key": (nobody, (("authorization", "Bearer ck-00000000-nothing"),)),
            "stranger": (dialling_credentials(stranger, "tls")(), named),
            "client": (client, named),
            "tenant": (client, self.keys.metadata("a")),
            "operator": (client, self.keys.metadata("operator")),
            "node": (dialling_credentials(self.node, "tls")(), ()),
        }


@pytest.fixture
def callers(tmp_path):
    return Callers(tmp_path)


@asynccontextmanager
async def conductor(callers, model: ServedModel):
    server = {"keys_file": str(callers.keys.path), "tls": callers.server}
    async with serving(model, lambda request: spoken(model, "hi"), server=server) as api:
        yield api.grpc_address, lambda: [request.tenant for request in api.dispatcher.requests]


@asynccontextmanager
async def store(callers, model: ServedModel):
    async with hosted(tls=callers.node) as hosting:
        assert await save(hosting.cache, "abc") == 3
        yield hosting.member.address, hosting.store.pool.accounts


async def told(channel, name, kind, metadata):
    """Call a method with all its fields set; return the status and its words.

    A connection that broke while it was made, as on a busy machine, says nothing of who is let in.
    """
    message = filled(kind, SERVICE, b"".join(chain_of("abc"))).SerializeToString()
    for _ in range(CALLS):
        status, words = await called(channel, name, message, metadata)
        if status != "UNAVAILABLE" and words != OF_THE_CLIENT:
            break
    return status, words


async def called(channel, name, message, metadata):
    call = channel.stream_stream(name)(iter([message]), timeout=60, metadata=metadata)
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        if "failed to connect" in error.details():
            return "NO CONNECTION", ""
        return error.code().name, error.details()
    call.cancel()
    return "OK", ""


@pytest.mark.parametrize("server", [conductor, store])
async def test_who_is_not_let_in_learns_and_changes_nothing(callers, tmp_path, server):
    rules = LET_IN[server.__name__]
    async with server(callers, tiny_model(tmp_path)) as (address, state):
        before = state()
        for who, (credentials, metadata) in callers.dialled.items():
            opened = (
                grpc.aio.insecure_channel(address)
                if credentials is None
                else grpc.aio.secure_channel(address, credentials)
            )
            reached, refusals = set(), set()
            async with opened as channel:
                for name, method in every_method():
                    if not is_let_in(who, rules.get(name, ())):
                        status, words = await told(channel, name, method.input_type, metadata)
                        refusals.add((status, words))
                        if status not in KEPT_OUT | {"UNIMPLEMENTED"}:
                            reached.add((name, status, words))
            assert not reached, (who, reached)
            assert state() == before, who
            assert len(refusals - {each for each in refusals if each[0] == "UNIMPLEMENTED"}) <= 1, refusals


@pytest.mark.parametrize("server", [conductor, store])
async def test_who_is_let_in_is_answered(callers, tmp_path, server):
    """The control of the other test: what is refused there is no call that nobody could make."""
    async with server(callers, tiny_model(tmp_path)) as (address, _):
        for who, (credentials, metadata) in callers.dialled.items():
            if credentials is not None:
                async with grpc.aio.secure_channel(address, credentials) as channel:
                    for name, method in every_method():
                        if is_let_in(who, LET_IN[server.__name__].get(name, ())):
                            status, _ = await told(channel, name, method.input_type, metadata)
                            assert status not in KEPT_OUT | {"UNIMPLEMENTED"}, (who, name)


def is_let_in(who, rule):
    return who in rule or ("everybody" in rule and who != "plain")
