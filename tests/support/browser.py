"""Headless Chromium, driven over the pipe of the DevTools protocol.

https://chromedevtools.github.io/devtools-protocol/: messages are JSON, each ended by a null byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome") if os.name == "posix" else ()
#: None if it is not installed, and on Windows, where a process cannot inherit pipes by number.
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
_PATIENCE = 60.0


class Browser:
    """One process of Chromium with one tab."""

    def __init__(self, profile: Path) -> None:
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        command = f'exec "$@" 3<&{read} 4>&{write}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe",
             "about:blank"],
            pass_fds=(read, write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read)
        os.close(write)
        self._buffer = bytearray()
        self._number = 0
        self._session = None
        self.events: list[dict] = []
        deadline = time.monotonic() + _PATIENCE
        pages = []
        while not pages and time.monotonic() < deadline:
            pages = [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """The result of a method of the protocol; events that arrive before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self):
        while (end := self._buffer.find(b"\0")) < 0:
            ready, _, _ = select.select([self._read], [], [], _PATIENCE)
            assert ready, "Chromium does not answer"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "Chromium has ended"
            self._buffer += chunk
        message = json.loads(self._buffer[:end])
        del self._buffer[: end + 1]
        return message

    def open(self, path: Path, *, width=1400, height=1000, dark=False) -> None:
        """Load a page, and wait until its scripts have drawn it."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + _PATIENCE
        while not self.run("document.documentElement?.dataset.drawn"):
            assert time.monotonic() < deadline, f"not drawn: {self.errors}"
            time.sleep(0.02)

    def run(self, expression):
        """The value of a JavaScript expression in the page; of a promise, what it resolves to."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def type(self, text) -> None:
        """Type a text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key, code=0) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def click(self, x, y) -> None:
        """Click at a point of the view."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path, *, whole=False) -> bytes:
        """Write a PNG of the view, or of the whole page if ``whole``."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path.read_bytes()

    @property
    def errors(self) -> list[str]:
        """Messages of the console, exceptions and violations of the policy, of the page that is open."""
        methods = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}
        return [json.dumps(one["params"]) for one in self.events if one["method"] in methods]

    @property
    def requests(self) -> list[str]:
        """Addresses that the page has asked for, itself included."""
        sent = [one["params"] for one in self.events if one["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent]

    def close(self) -> None:
        """End the process and its children."""
        self._session = None
        self.call("Browser.close")
        self._process.wait(_PATIENCE)
        os.close(self._read)
        os.close(self._write)
