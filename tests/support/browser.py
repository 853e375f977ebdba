"""Headless Chromium, driven over its debugging pipe: pages are opened, buttons clicked, and texts read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60.0


class Browser:
    """A page in a browser.

    Args:
        stream: the messages of the browser, JSON with a zero byte after each.
        write: the file descriptor for messages to the browser.
    """

    def __init__(self, stream: Any, write: int) -> None:
        self._stream = stream
        self._write = write
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.failures: list[str] = []
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.failures.append(json.dumps(answer["params"]))

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            block = self._stream.read(1 << 16)
            assert block, "the browser has ended"
            self._rest += block
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        """Open a page, and wait until its script has run."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + SECONDS
        while not self.value(expression):
            assert time.monotonic() < end, f"never true: {expression}; {self.value('document.body.innerText')}"
            time.sleep(0.05)

    def text(self, element: str) -> str:
        return str(self.value(f"document.getElementById({element!r}).innerText"))

    def click(self, element: str) -> None:
        """Click in the middle of an element with the mouse."""
        box = self.value(
            f"(() => {{ const e = document.getElementById({element!r}); e.scrollIntoView({{block: 'center'}});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, element: str, text: str) -> None:
        """Click on a field, and type a text into it."""
        self.click(element)
        self.call("Input.insertText", text=text)

    def choose(self, element: str, files: list[Path]) -> None:
        response = self.call("Runtime.evaluate", expression=f"document.getElementById({element!r})")
        names = [str(path) for path in files]
        self.call("DOM.setFileInputFiles", files=names, objectId=response["result"]["objectId"])


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser with its profile in a folder. Skip the test if no browser is installed."""
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    to_browser, from_browser = os.pipe(), os.pipe()
    arguments = [
        *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
        f"--user-data-dir={folder / 'profile'}",
    ]
    ends = (to_browser[0], from_browser[1])
    script = f'exec 3<&{ends[0]} 4>&{ends[1]}; exec "$0" "$@"'
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", script, program, *arguments], pass_fds=ends, stdout=log, stderr=log, start_new_session=True
        )
    for descriptor in ends:
        os.close(descriptor)
    try:
        with os.fdopen(from_browser[0], "rb", buffering=0) as stream:
            yield Browser(stream, to_browser[1])
    finally:
        process.terminate()
        process.wait(20)
        os.close(to_browser[1])
