"""A headless Chromium, driven over its own protocol: what a page's tests need of one."""

import base64
import json
import re
import subprocess
from contextlib import contextmanager
from pathlib import Path

from websockets.sync.client import connect

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run")


class Page:
    """One page of the browser. Every call blocks until it is answered."""

    def __init__(self, socket):
        self._socket = socket
        self._session = None
        self._number = 0
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call(
            "Emulation.setDeviceMetricsOverride", width=1200, height=1500, deviceScaleFactor=1, mobile=False
        )

    def open(self, url):
        self._call("Page.navigate", url=url)

    def until(self, expression, timeout_s=10):
        """Wait until JavaScript's `expression` is true there; return its value."""
        promise = (
            "new Promise((yes, no) => { let n = 0; const look = () => { "
            f"let value = null; try {{ value = {expression}; }} catch (e) {{}} "
            f"if (value) yes(value); else if (++n > {20 * timeout_s}) no(new Error('it never was')); "
            "else setTimeout(look, 50); }; look(); })"
        )
        return self.run(promise)

    def run(self, expression):
        """Return the value of an expression, which may be a promise of it."""
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector):
        """Press and release the mouse over the middle of an element."""
        place = self.run(
            f"(() => {{ const r = document.querySelector({json.dumps(selector)}); "
            "r.scrollIntoView({block: 'center'}); const b = r.getBoundingClientRect(); "
            "return {x: b.x + b.width / 2, y: b.y + b.height / 2}; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def key(self, name):
        """Press and release a key, by its name."""
        codes = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}
        told = {"key": name, "code": name, "windowsVirtualKeyCode": codes[name]}
        text = {"text": "\r"} if name == "Enter" else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", **told, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **told)

    def write(self, text):
        """Type a text where the focus is."""
        self._call("Input.insertText", text=text)

    def show_as(self, width, height, scheme):
        """Be a screen of that size whose user likes the colour scheme, light or dark."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def whole_page(self) -> bytes:
        """Return all of the page as a PNG, what one has to scroll to included."""
        size = self.run("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(answer["data"])

    def _call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]


@contextmanager
def chromium(folder: Path):
    """A page of a browser that keeps its files in `folder`, for the length of the body."""
    command = ["chromium", *FLAGS, f"--user-data-dir={folder}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = next(line for line in process.stderr if "DevTools listening" in line)
            with connect(re.search(r"ws://\S+", said)[0], max_size=1 << 26) as socket:
                yield Page(socket)
        finally:
            process.terminate()
