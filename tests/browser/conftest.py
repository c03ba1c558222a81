"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

PATIENCE = 60.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
    "--window-size=1280,1400",
)


class Browser:
    """One tab. What the page asks for, and what its console says, is kept."""

    def __init__(self, address: str) -> None:
        from websockets.sync.client import connect  # of the extra `proxy`

        self._socket = connect(address, max_size=2**28, compression=None, proxy=None)
        self._sent = 0
        self.requests: list[str] = []
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": params}))
        while True:
            said = json.loads(self._socket.recv(PATIENCE))
            if said.get("id") == self._sent:
                assert "error" not in said, said
                return said["result"]
            self._note(said)

    def _note(self, said: dict[str, Any]) -> None:
        params = said.get("params", {})
        if said["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif said["method"] == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif said["method"] == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params))

    def open(self, url: str) -> None:
        self.call("Page.navigate", url="about:blank")
        self.requests.clear()
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True,
                          returnByValue=True)  # fmt: skip
        return found["result"].get("value")

    def text(self, selector: str = "main") -> str:
        return self.value(f"document.querySelector({selector!r})?.innerText ?? ''")

    def until(self, expression: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.value(expression):
            assert time.monotonic() < deadline, (expression, self.text(), self.complaints)
            time.sleep(0.05)

    def dark(self, on: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def width(self, pixels: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=pixels, height=1400,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip

    def screenshot(self, path: Path) -> None:
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.fail("no chromium here: apt-get install chromium")
    profile = tmp_path_factory.mktemp("profile")
    command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    told = profile / "DevToolsActivePort"
    _until(lambda: told.exists() and told.read_text().count("\n") > 0)
    port = told.read_text().split("\n")[0]
    with httpx.Client(trust_env=False) as http:
        tabs = http.get(f"http://127.0.0.1:{port}/json").json()
    tab = Browser(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
    yield tab
    tab.close()
    process.terminate()
    process.wait(30)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
