"""A program that speaks the process protocol of `deploy/supervisor.py`, and nothing more.

As `conductor` it answers chat completions over HTTP by streaming the prompt back in
capitals. As `node` it does nothing. As `prepare` it names a model. Its first argument says
which it is; `FAULT` in the environment makes one of them fail.
"""

import json
import os
import signal
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import uvloop

from base.lifetime import Lifetime

STATUS = {
    "ready": True,
    "supervised": True,
    "running_requests": 0,
    "nodes": [
        {
            "id": "decode-0",
            "host": "h",
            "roles": ["decode"],
            "epoch": "00ffee1122334455",
            "transports": ["shm", "tcp"],
            "weights": "int8",
            "weights_error": 0.01,
            "kv_token_bytes": 23040,
            "blocks": 40,
            "block_size": 64,
            "requests": 0,
            "free_blocks": 37,
            "held_blocks": 3,
            "running": 1,
            "waiting": 0,
            "draining": True,
            "experts": {
                "choices": 800,
                "busiest": 1.5,
                "busiest_of_a_layer": 2.25,
                "busiest_rank": 1.25,
                "ranks": [1.125, 0.875],
            },
        },
        {
            "id": "new",
            "host": "h",
            "roles": ["prefill", "decode"],
            "epoch": "1",
            "transports": [],
            "weights": "float32",
            "weights_error": 0.0,
            "blocks": 4,
        },
    ],
}


class Api(BaseHTTPRequestHandler):
    def log_message(self, format, *args):
        pass

    def do_GET(self):
        # A stub of a node does not attach: one that was configured in the same folder counts as attached.
        names = [path.stem for path in self.server.folder.glob("*.json")]
        attached = [{"id": name} for name in names if name not in ("conductor", "decode-0")]
        status = {**STATUS, "nodes": [*STATUS["nodes"], *attached]}
        answers = {"/status": status, "/health": {"status": "ok"}, "/v1/models": {"data": [{"id": "m"}]}}
        table = answers[self.path]
        self._answer(200, json.dumps(table))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"].upper()
        if text == "TEMPERATURE":
            text = str(body.get("temperature"))
        if body["messages"][-1]["role"] == "user" and text == "COMPUTE" and body.get("tools"):
            self._call("6 * 7")
            return
        if text == "COMPUTE 1":
            text = f"{body.get('tool_choice')}".upper()
            if body.get("tool_choice") == "required":
                self._call("1 + 1")
                return
        if text == "REFUSE":
            self._answer(400, json.dumps({"error": {"message": "refused, as asked"}}))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        deltas = [{"role": "assistant", "content": ""}, *({"content": letter} for letter in text), {}]
        for delta in deltas:
            chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": None if delta else "stop"}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            if text == "CUT":
                return
            if text == "WAIT" or (text == "STAY" and delta.get("content")):
                self.rfile.read(1)  # until the client hangs up
                return
        self.wfile.write(b"data: [DONE]\n\n")

    def _call(self, expression):
        """Answer with a call of the first tool, in two parts."""
        arguments = json.dumps({"expression": expression})
        head = {
            "index": 0,
            "id": "c1",
            "type": "function",
            "function": {"name": "calculator", "arguments": ""},
        }
        parts = ({"index": 0, "function": {"arguments": part}} for part in (arguments[:9], arguments[9:]))
        self.send_response(200)
        self.end_headers()
        for call in (head, *parts):
            chunk = {"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


def main():
    role, fault = sys.argv[1], os.environ.get("FAULT", "")
    if role == "prepare":
        print("preparing", file=sys.stderr, flush=True)
        if fault == "prepare":
            sys.exit("there is no such model")
        print(json.dumps({"path": "/nowhere", "model_id": "stub@1", "name": sys.argv[2]}))
        return
    if "--spare" in sys.argv and not os.read(0, 1):
        return
    if fault == role:
        sys.exit(f"this {role} fails, as it was told to")
    config = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    if role == "conductor":
        server = ThreadingHTTPServer(("127.0.0.1", config["server"]["http_port"]), Api)
        server.folder = Path(sys.argv[sys.argv.index("--config") + 1]).parent
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        grpc = socket.create_server(("127.0.0.1", config["server"]["grpc_port"]))
        said = {"http_port": server.server_address[1], "grpc_port": grpc.getsockname()[1], "attach_port": 1}
    else:
        said = {"node_id": config["node_id"], "metrics_port": 1}
    uvloop.run(live(role, said, fault))
    if fault == "lingering":
        os.closerange(3, 256)
        signal.pause()


async def live(role, said, fault):
    path = Path(sys.argv[sys.argv.index("--lifeline") + 1]) if "--lifeline" in sys.argv else None
    if fault == "hanging":
        signal.signal(signal.SIGUSR1, lambda *_: threading.Event().wait())
    lifetime = Lifetime(path, float(os.environ.get("ADOPTION_S", "30")))
    print(f"{role} is up", file=sys.stderr, flush=True)
    await lifetime.ready(**said)
    reason = await lifetime.stopped()
    if fault == "deaf" and reason == "SIGTERM":
        signal.pause()


if __name__ == "__main__":
    main()
