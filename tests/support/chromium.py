"""Pages in headless Chromium, over its DevTools pipe: standard library only. Tests skip where it is not installed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "about:blank")
TIMEOUT_S = 60


class Tab:
    """One page. Scripts of a test run in it whatever its own policy is."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._last, self._rest = write, read, 0, b""
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        answer = self._wait(lambda each: each.get("id") == self._last)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _wait(self, wanted: Any) -> dict[str, Any]:
        """The next message of the browser that is wanted."""
        while True:
            while b"\0" not in self._rest:
                part = os.read(self._read, 1 << 16)
                assert part, "the browser has ended"
                self._rest += part
            line, self._rest = self._rest.split(b"\0", 1)
            message: dict[str, Any] = json.loads(line)
            if wanted(message):
                return message

    def open(self, page: Path, *, width: int, dark: bool = False) -> None:
        """Load a page in a window of a width."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self._call("Page.navigate", url=page.resolve().as_uri())
        self._wait(lambda message: message.get("method") == "Page.loadEventFired")

    def value(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def media(self, name: str) -> None:
        """Apply the style rules of a medium, such as "print"."""
        self._call("Emulation.setEmulatedMedia", media=name)

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self._call("Page.printToPDF", preferCSSPageSize=True)["data"])


@contextmanager
def tab() -> Iterator[Tab]:
    """A page in a browser that is closed at the end."""
    assert PROGRAM is not None, "Chromium is not installed"
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()

    def arrange() -> None:  # the browser reads from file descriptor 3 and writes to 4
        os.dup2(to_browser, 13)
        os.dup2(from_browser, 14)
        os.dup2(13, 3)
        os.dup2(14, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [PROGRAM, f"--user-data-dir={folder}", *OPTIONS]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=arrange, close_fds=False
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Tab(write, read)
        finally:
            os.close(write)
            os.close(read)
            process.terminate()
            process.wait(TIMEOUT_S)
