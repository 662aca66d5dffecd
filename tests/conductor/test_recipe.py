"""The commands of docs/how-to/tls-and-keys.md, followed to the letter but for the names of hosts."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest

from base.config import TlsConfig
from kvstore.context import connected
from tests.conductor.test_tls import Secure, generated, is_attached
from tests.kvstore.cluster import load, save
from tests.kvstore.test_store_port import hosted

RECIPE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "tls-and-keys.md"
NAMES = {
    "conductor.example": "localhost",
    "node-1.example": "localhost",
    "10.0.0.10": "127.0.0.1",
    "10.0.0.11": "127.0.0.1",
}
MINT = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=minted "
    "-keyout minted.key -CA {name}.pem -CAkey {name}.key -addext subjectAltName=URI:urn:conductor:node "
    "-out minted.pem"
)


def commands():
    """Return the commands of the document, for hosts that are this one."""
    text = RECIPE.read_text().replace("\\\n", " ")
    for name, here in NAMES.items():
        assert name in text
        text = text.replace(name, here)
    return re.findall(r"^    (openssl req .*)$", text, re.MULTILINE)


def run(command, folder):
    return subprocess.run(shlex.split(command), cwd=folder, capture_output=True, text=True, check=False)


class Recipe:
    """What the commands made, as `tests.certificates.Authority` has it."""

    def __init__(self, folder):
        self.folder = folder
        self.path = str(folder / "ca.pem")
        self.pem = (folder / "ca.pem").read_bytes()

    def issue(self, name, uri=None):
        return TlsConfig(str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key"), self.path)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    if shutil.which("openssl") is None or " 3." not in run("openssl version", "/").stdout:
        pytest.skip("OpenSSL 3 makes these certificates")
    folder = tmp_path_factory.mktemp("recipe")
    for command in commands():
        done = run(command, folder)
        assert done.returncode == 0, done.stderr
    return Recipe(folder)


async def test_clients_and_nodes_reach_the_conductor(model, recipe):
    async with Secure(model, recipe) as secure:
        for host in ("localhost", "127.0.0.1"):
            address = f"{host}:{secure.api.ports.grpc_port}"
            assert await generated(address, grpc.ssl_channel_credentials(recipe.pem)) == "hi"
        assert await is_attached(secure, recipe.issue("node"))


async def test_programs_reach_a_store(recipe):
    own = recipe.issue("node")
    async with hosted(tls=own) as store, connected([store.member.address], tls=own) as cache:
        assert await save(cache, "abc") == 3
        assert await load(cache, "abc") == 3


@pytest.mark.parametrize("name", ["server", "node"])
def test_who_has_a_certificate_makes_no_node_of_another(recipe, name):
    assert run(MINT.format(name=name), recipe.folder).returncode == 0
    verify = f"openssl verify -CAfile ca.pem -untrusted {name}.pem minted.pem"
    assert run(verify, recipe.folder).returncode != 0
    assert run(f"openssl verify -CAfile ca.pem {name}.pem", recipe.folder).returncode == 0
