"""Who may call what: the sweep over all routes and methods, keys, tenants and quotas."""

import asyncio
import contextlib
import dataclasses
import json
import re
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from base.block_hash import chain_root
from base.config import ServerConfig, TlsConfig
from base.errors import ConfigError, RejectedError, UnauthenticatedError
from conductor.api.keys import KeyFile, KeyRing, Quota, TokenBucket, change_keys, made_key, read_keys
from conductor.api.routes import ROUTES, routes_at
from conductor.api.web_page import MODULES
from deploy.keys import main as keys_command
from protos import inference_pb2, inference_pb2_grpc
from tests.conductor.fakes import MODEL, WAIT, serving, spoken
from tests.effort import counting
from tests.every_method import every_method

CHAT = "/v1/chat/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
REPORTS = {"/status": dict, "/v1/explain/{name}": lambda name: {"of": name}}
CLIENTS = (
    {"/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings"}
    | {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}"}
    | {
        "/tokenize",
        "/detokenize",
        "/version",
    }
)

OPEN = {"/", "/health", "/openapi.json", "/ui", "/ui/style.css", *(f"/ui/{name}.js" for name in MODULES)}
"""The page's files hold nothing; what they ask for is closed."""


class Keys:
    """A file of three keys: two tenants' and an operator's."""

    def __init__(self, folder, **quota):
        self.path = folder / "keys.json"
        made = {name: made_key(name, name, name == "operator") for name in ("a", "b", "operator")}
        self.secrets = {name: secret for name, (_, secret) in made.items()}
        tenants = {name: Quota(**quota) if name == "a" else Quota() for name in made}
        change_keys(self.path, lambda: KeyFile(tenants, tuple(key for key, _ in made.values())))

    def header(self, name):
        return {"Authorization": f"Bearer {self.secrets[name]}"}

    def metadata(self, name):
        return (("authorization", f"Bearer {self.secrets[name]}"),)


@pytest.fixture
def keys(tmp_path):
    return Keys(tmp_path)


def guarded(model, keys, script=None, **server):
    script = script or (lambda request: spoken(model, "hi"))
    return serving(model, script, server={"keys_file": str(keys.path), **server}, reports=REPORTS)


def routes_of():
    """Every method of every path that the listener answers."""
    reads = [("HEAD", route.path) for route in ROUTES if route.method == "GET"]
    return sorted(
        (method, path)
        for method, path in [*reads, *((route.method, route.path) for route in ROUTES)]
        if path in REPORTS or routes_at(path)[0][method.replace("HEAD", "GET")].handler is not None
    )


def strangers(secret):
    yield {}
    yield {"Authorization": secret}
    yield {"Authorization": f"Basic {secret}"}
    yield {"Authorization": f"Bearer {secret[:-1]}"}
    yield {"Authorization": f"Bearer {secret}x"}
    yield {"Authorization": "Bearer ck-00000000-nothing"}
    yield {"Authorization": "Bearer"}
    yield {"X-Tenant-Id": "a"}
    yield {"X-Api-Key": f"{secret}x"}


async def test_every_http_route_but_health_wants_a_key(model, keys):
    async with guarded(model, keys) as api, httpx.AsyncClient(base_url=api.url) as client:
        routes = routes_of()
        assert {path for _, path in routes} >= CLIENTS | {"/health", "/metrics", "/status"}
        for method, route in [*routes, ("GET", "/nowhere"), ("GET", "/health/"), ("GET", "//health")]:
            path = re.sub(r"{[^}]*}", "x", route)
            expected = 307 if route == "/" else 200 if route in OPEN else 401
            for headers in strangers(keys.secrets["a"]):
                answer = await client.request(method, f"{api.url}{path}", headers=headers)
                assert answer.status_code == expected, (method, path, headers)
        assert not api.dispatcher.requests
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_a_key_may_come_where_clients_of_anthropics_put_it(model, keys):
    async with guarded(model, keys) as api, httpx.AsyncClient(base_url=api.url) as client:
        headers = {"x-api-key": keys.secrets["a"]}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_what_is_about_the_cluster_wants_an_operator(model, keys):
    async with guarded(model, keys) as api, httpx.AsyncClient(base_url=api.url) as client:
        for method, route in routes_of():
            path = re.sub(r"{[^}]*}", "x", route)
            of_a = await client.request(method, path, headers=keys.header("a"), content=b"{}")
            of_operator = await client.request(method, path, headers=keys.header("operator"), content=b"{}")
            assert (of_a.status_code == 403) == (route not in CLIENTS | OPEN), path
            assert of_operator.status_code not in (401, 403)


async def test_metrics_are_open_where_that_is_configured(model, keys):
    async with guarded(model, keys, open_metrics=True) as api, httpx.AsyncClient() as client:
        assert (await client.get(f"{api.url}/metrics")).status_code == 200
        assert (await client.get(f"{api.url}/status")).status_code == 401


async def test_reflection_tells_of_no_service_that_the_sweep_misses(model, keys):
    swept = {name.split("/")[1] for name, _ in every_method()}
    async with guarded(model, keys) as api, grpc.aio.insecure_channel(api.grpc_address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = stub.ServerReflectionInfo(iter([ask]), timeout=60, metadata=keys.metadata("operator"))
        listed = {item.name for item in (await answers.read()).list_services_response.service}
    assert listed <= swept


async def test_the_key_says_whose_call_it_is(model, keys):
    """Also where the caller claims to be somebody else: tenants share no cached prefix."""
    async with guarded(model, keys) as api:
        async with httpx.AsyncClient(base_url=api.url) as client:
            for name in ("a", "b"):
                headers = {**keys.header(name), "x-tenant-id": "somebody"}
                assert (await client.post(CHAT, json=HELLO, headers=headers)).status_code == 200
        async with grpc.aio.insecure_channel(api.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(text="hello", stop=inference_pb2.Stop(max_tokens=2))
            metadata = (*keys.metadata("b"), ("x-tenant-id", "somebody"))
            assert [part async for part in stub.Generate(request, metadata=metadata, timeout=60)]
        assert [request.tenant for request in api.dispatcher.requests] == ["a", "b", "b"]


salts = st.text(max_size=5)


@given(one=st.tuples(salts, salts), other=st.tuples(salts, salts))
def test_no_salt_reaches_another_tenants_blocks(one, other):
    roots = [chain_root("model", "layout", tenant, salt) for tenant, salt in (one, other)]
    assert (roots[0] == roots[1]) == (one == other)


async def test_a_tenant_past_its_rate_is_told_when_to_come_back(model, tmp_path):
    keys = Keys(tmp_path, requests_per_s=0.1, burst=2)
    async with guarded(model, keys) as api, httpx.AsyncClient(base_url=api.url) as client:
        answers = [await client.post(CHAT, json=HELLO, headers=keys.header("a")) for _ in range(3)]
        other = await client.post(CHAT, json=HELLO, headers=keys.header("b"))
        async with grpc.aio.insecure_channel(api.grpc_address) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).ListModels(
                inference_pb2.ListModelsRequest(), metadata=keys.metadata("a"), timeout=60
            )
            assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 10
    assert other.status_code == 200


async def test_a_tenants_requests_in_progress_are_bounded(model, tmp_path):
    keys = Keys(tmp_path, concurrent=1)
    async with (
        guarded(model, keys, lambda request: [WAIT]) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        running = asyncio.create_task(client.post(CHAT, json=HELLO, headers=keys.header("a")))
        await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 1)
        refused = await client.post(CHAT, json=HELLO, headers=keys.header("a"))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        running.cancel()
        await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 0)
        async with asyncio.timeout(60):
            while True:
                answer = await client.get("/v1/models", headers=keys.header("a"))
                if answer.status_code == 200:
                    break


async def test_the_choices_of_a_call_count_in_its_tenants_quota(model, tmp_path):
    keys = Keys(tmp_path, concurrent=4)
    async with (
        guarded(model, keys, lambda request: [WAIT]) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        asked = {**HELLO, "n": 3}
        running = asyncio.create_task(client.post(CHAT, json=asked, headers=keys.header("a")))
        await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 1)
        refused = await client.post(CHAT, json={**HELLO, "n": 2}, headers=keys.header("a"))
        assert refused.status_code == 429
        assert "1 choices more" in refused.json()["error"]["message"]
        running.cancel()
        await api.completions.wait_idle()


def test_the_choices_of_a_call_are_owed_to_the_rate():
    clock = SetClock()
    bucket = TokenBucket(Quota(requests_per_s=1.0, burst=2), clock)
    bucket.take("t")
    bucket.take_more("t", 4)
    clock.at_s = 3.5
    with pytest.raises(RejectedError) as refused:
        bucket.take("t")
    assert refused.value.retry_after_s == 0.5
    clock.at_s = 4.0
    bucket.take("t")


@pytest.mark.parametrize(
    "quota",
    [{"requests_per_s": value} for value in (float("nan"), float("inf"), -1.0, 1e-300)]
    + [{"burst": value} for value in (0, -1, 10**400)]
    + [{"concurrent": value} for value in (-1, 10**400)],
)
def test_a_quota_that_no_bucket_can_reckon_with_is_refused(quota):
    with pytest.raises(ValueError, match="quotas are numbers, not negative and at most 1e"):
        Quota(**quota)


class SetClock:
    def __init__(self):
        self.at_s = 0.0

    def now_s(self):
        return self.at_s


@given(
    quota=st.builds(Quota, st.floats(0.5, 100.0), st.integers(1, 5), st.integers(1, 4)),
    steps=st.lists(st.one_of(st.just("ask"), st.just("end"), st.floats(0.0, 3.0)), max_size=60),
)
def test_a_bucket_never_lets_more_through_than_its_quota(quota, steps):
    clock = SetClock()
    bucket = TokenBucket(quota, clock)
    num_taken = 0
    for step in steps:
        if step == "ask":
            with contextlib.suppress(RejectedError):
                bucket.take("t")
                num_taken += 1
        elif step == "end":
            if bucket.num_running:
                bucket.give_back(1)
        else:
            clock.at_s += step
        assert bucket.num_running <= quota.concurrent
        assert num_taken <= quota.burst + clock.at_s * quota.requests_per_s + 1e-6


def test_keys_are_hashed_at_rest_and_closed_to_others(keys):
    text = keys.path.read_text()
    for secret in keys.secrets.values():
        assert secret.split("-", 2)[2] not in text
        assert secret not in text
    assert keys.path.stat().st_mode & 0o077 == 0


def test_keys_come_and_go_without_a_restart(keys):
    clock = SetClock()
    ring = KeyRing(keys.path, clock)
    file = read_keys(keys.path)
    added, secret = made_key("new", "a")
    with pytest.raises(UnauthenticatedError):
        ring.find(secret)
    change_keys(keys.path, lambda: dataclasses.replace(file, keys=(added,)))
    clock.at_s = 2.0
    assert ring.find(secret) == added
    with pytest.raises(UnauthenticatedError):
        ring.find(keys.secrets["a"])
    keys.path.write_text("{")
    clock.at_s = 4.0
    assert ring.find(secret) == added


async def test_a_long_file_of_keys_is_read_beside_the_event_loop(tmp_path):
    """Some thousand keys take longer than any call may hold it, whenever one of them comes or goes."""
    path, clock = tmp_path / "keys.json", SetClock()
    record, secret = made_key("new", "a")
    others = tuple(dataclasses.replace(record, id=f"{number:x}") for number in range(2_000))
    change_keys(path, lambda: KeyFile({"a": Quota()}, others[:1]))
    ring = KeyRing(path, clock)
    change_keys(path, lambda: KeyFile({"a": Quota()}, (*others, record)))
    clock.at_s, found = 2.0, None
    with counting() as effort, contextlib.suppress(UnauthenticatedError):
        ring.find(secret)
    assert effort.lines < len(others)
    async with asyncio.timeout(60):
        while found is None:
            await asyncio.sleep(0)
            with contextlib.suppress(UnauthenticatedError):
                found = ring.find(secret)
    assert found == record


@given(garbage=st.text(max_size=80))
def test_no_garbage_is_a_key(tmp_path_factory, garbage):
    keys = Keys(tmp_path_factory.mktemp("keys"))
    ring = KeyRing(keys.path, SetClock())
    for presented in (
        garbage,
        f"ck-{garbage}",
        f"{keys.secrets['a'][:12]}{garbage}",
        f"{keys.secrets['a']}{garbage}x",
    ):
        with pytest.raises(UnauthenticatedError):
            ring.find(presented)


RECORD = {"id": "00", "name": "n", "tenant": "t", "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (None, "No such file"),
        ([], "TypeError"),
        ({}, "tenants"),
        ({"tenants": {}, "keys": [RECORD]}, "the tenant 't' is not there"),
        ({"tenants": {"t": {}}, "keys": [{**RECORD, "sha256": "zz"}]}, "ValueError"),
        ({"tenants": {"t": {}}, "keys": [{**RECORD, "sha256": "00"}]}, "no SHA-256"),
        ({"tenants": {"t": {}}, "keys": [{**RECORD, "name": 3}]}, "are text"),
        ({"tenants": {"t": {"concurrent": -1}}, "keys": []}, "not negative"),
        ({"tenants": {"t": {"rate": 1}}, "keys": []}, "rate"),
    ],
)
def test_a_file_that_is_wrong_says_so(tmp_path, table, told):
    path = tmp_path / "keys.json"
    if table is not None:
        path.write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=told):
        KeyRing(path, SetClock())


TLS = TlsConfig("cert.pem", "cert.key")


@pytest.mark.parametrize("section", [{}, {"keys_file": "k"}, {"tls": TLS}])
def test_another_address_wants_both_tls_and_keys(section):
    with pytest.raises(ValueError, match="host: loopback"):
        ServerConfig(host="0.0.0.0", **section)
    ServerConfig(host="0.0.0.0", insecure=True, **section)
    ServerConfig(host="0.0.0.0", tls=TLS, keys_file="k")


class CriticalKeys(Keys):
    """Where the tenant a has a second key, whose requests may be critical."""

    def __init__(self, folder):
        super().__init__(folder)
        made, self.secrets["critical"] = made_key("critical", "a", critical=True)
        file = read_keys(self.path)
        change_keys(self.path, lambda: KeyFile(file.tenants, (*file.keys, made)))


async def asked_over_http(client, priority, headers):
    answer = await client.post(CHAT, json={**HELLO, "priority": priority}, headers=headers)
    return answer.status_code, answer.text


async def asked_over_grpc(stub, priority, metadata):
    asked = inference_pb2.GenerateRequest(text="hello", priority=priority)
    try:
        async for _ in stub.Generate(asked, metadata=metadata, timeout=60):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


async def test_the_critical_class_is_for_keys_that_have_it(model, tmp_path):
    keys = CriticalKeys(tmp_path)
    async with (
        guarded(model, keys) as api,
        httpx.AsyncClient(base_url=api.url) as client,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        for name, sign in (("a", 0), ("operator", 0), ("critical", 1)):
            claims = {**keys.header(name), "x-tenant-id": "critical", "conductor.critical": "true"}
            status, text = await asked_over_http(client, -1, claims)
            assert (status, "--critical" in text) == ((200, False) if sign else (403, True))
            code, details = await asked_over_grpc(stub, 1, keys.metadata(name))
            wanted = grpc.StatusCode.OK if sign else grpc.StatusCode.PERMISSION_DENIED
            assert (code, "--critical" in details) == (wanted, not sign)
            for priority in (0, 1):
                assert (await asked_over_http(client, priority, keys.header(name)))[0] == 200
                assert (await asked_over_grpc(stub, -priority, keys.metadata(name)))[0] is grpc.StatusCode.OK
    assert sum(request.priority > 0 for request in api.dispatcher.requests) == 2


@pytest.mark.parametrize(("allowed", "tenants"), [((), ""), (("b",), "b"), (("*",), "abc")])
async def test_without_keys_configuration_says_whose_requests_may_be_critical(model, allowed, tenants):
    server = {"critical_tenants": allowed}
    async with (
        serving(model, lambda request: spoken(model, "hi"), server=server) as api,
        httpx.AsyncClient(base_url=api.url) as client,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        for tenant in "abc":
            status, _ = await asked_over_http(client, -1, {"x-tenant-id": tenant})
            code, _ = await asked_over_grpc(stub, 1, (("x-tenant-id", tenant),))
            may = tenant in tenants
            assert status == (200 if may else 403)
            assert code is (grpc.StatusCode.OK if may else grpc.StatusCode.PERMISSION_DENIED)


def test_keys_of_a_file_that_is_not_there_cannot_be_listed(tmp_path, capsys):
    limits = {"rate": None, "burst": None, "concurrent": None}
    with pytest.raises(RuntimeError):
        keys_command(
            ["list"], file=tmp_path / "kyes.json", tenant="", **limits, operator=False, critical=False
        )
    assert "kyes.json: No such file or directory" in capsys.readouterr().err


def test_a_key_is_made_critical_by_its_command_and_listed_so(tmp_path, capsys):
    path = tmp_path / "keys.json"
    command = {"file": path, "tenant": "", "rate": None, "burst": None, "concurrent": None, "operator": False}
    keys_command(["add", "web"], **command, critical=True)
    keys_command(["add", "batch"], **command, critical=False)
    assert [key.critical for key in read_keys(path).keys] == [True, False]
    capsys.readouterr()
    keys_command(["list"], **command, critical=False)
    web, batch = capsys.readouterr().out.splitlines()
    assert web.endswith("critical")
    assert not batch.endswith("critical")
    with pytest.raises(RuntimeError):
        keys_command(["add", "one", "two"], **command, critical=False)
    assert "not also two" in capsys.readouterr().err


COMMAND = {
    **dict.fromkeys(("rate", "burst", "concurrent")),
    **dict.fromkeys(("operator", "critical"), False),
    "tenant": "",
}


def test_of_two_commands_at_once_none_undoes_what_the_other_did(tmp_path, monkeypatch):
    """A key that was removed would be there again, and one that was printed would not."""
    path, read, added = tmp_path / "keys.json", Path.read_text, []

    def read_while_another_adds(file, *arguments):
        text = read(file, *arguments)
        monkeypatch.setattr(Path, "read_text", read)
        with contextlib.suppress(RuntimeError):
            keys_command(["add", "another"], file=path, **COMMAND)
            added.append("another")
        return text

    keys_command(["add", "web"], file=path, **COMMAND)
    monkeypatch.setattr(Path, "read_text", read_while_another_adds)
    keys_command(["add", "batch"], file=path, **COMMAND)
    assert [key.name for key in read_keys(path).keys] == ["web", *added, "batch"]
    keys_command(["add", "another"], file=path, **COMMAND)


def test_a_command_that_fails_leaves_the_file_to_the_next(tmp_path, monkeypatch):
    path = tmp_path / "keys.json"
    keys_command(["add", "web"], file=path, **COMMAND)

    def full(*arguments, **options):
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("conductor.api.keys.json.dump", full)
        for words in (["add", "batch"], ["remove", "web"], ["remove", "nobody"]):
            with pytest.raises(RuntimeError):
                keys_command(words, file=path, **COMMAND)
    assert [each.name for each in tmp_path.iterdir()] == ["keys.json"]
    keys_command(["remove", "web"], file=path, **COMMAND)
    assert read_keys(path) == KeyFile({}, ())


def test_a_file_of_keys_in_no_folder_is_named_as_it_was_asked_for(tmp_path, capsys):
    path = tmp_path / "folder" / "keys.json"
    with pytest.raises(RuntimeError):
        keys_command(["remove", "web"], file=path, **COMMAND)
    assert capsys.readouterr().err == f"{path}: No such file or directory\n"
