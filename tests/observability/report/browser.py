"""A headless Chromium, driven through its pipe by the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from typing import Any

from tests.time_limits import wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
WAIT_S = 30


def find_browser() -> str | None:
    """The program, as `TFPAR_CHROMIUM` names it or as it is found; None: there is none."""
    named = os.environ.get("TFPAR_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One window. What pages log as errors and what they ask for is kept.

    Attributes:
        errors: messages of the console that are errors or warnings, and exceptions.
        requests: addresses that were asked for.
    """

    def __init__(self, program: str):
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ours, theirs = os.pipe(), os.pipe()  # what it reads is 3, what it writes is 4
        command = [
            *(program, "--headless=new", "--remote-debugging-pipe", "--no-sandbox"),
            *("--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run"),
            *(f"--user-data-dir={self._profile.name}", "about:blank"),
        ]
        # `exec` by a shell moves the pipe's ends to where Chromium looks for them.
        moved = f'exec "$@" 3<&{ours[0]} 4>&{theirs[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", moved, "bash", *command],
            pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._write, self._read = os.fdopen(ours[1], "wb"), os.fdopen(theirs[0], "rb")
        self._rest = b""
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def close(self) -> None:
        """End it, and wait until it has ended."""
        self._session = None
        try:
            self._call("Browser.close")
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait()
            self._write.close()
            self._read.close()
            self._profile.cleanup()

    def open(self, address: str, ready: str = "document.readyState === 'complete'") -> float:
        """Load a page until `ready` holds; the seconds that it took."""
        start = time.monotonic()
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=address)
        self.wait(ready)
        return time.monotonic() - start

    def wait(self, condition: str) -> None:
        """Until JavaScript's `condition` is true."""
        if not wait_until(lambda: self.evaluate(f"Boolean({condition})"), WAIT_S):
            raise TimeoutError(f"{condition} never held; errors: {self.errors}")

    def evaluate(self, code: str) -> Any:
        """The value of an expression in the page, awaited."""
        found = self._call(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{code}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """Click in the middle of the first element that `selector` names."""
        at = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2] }"
            ")()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call(
                "Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", clickCount=1
            )

    def press(self, key: str) -> None:
        """A key, by its name: `/`, `a`, `Escape`, `ArrowDown`."""
        text = {"text": key} if len(key) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def resize(self, width: int, height: int) -> None:
        """The window, in pixels."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )

    def media(self, scheme: str = "light", kind: str = "screen") -> None:
        """What the page is shown on."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", media=kind, features=features)

    def screenshot(self, path: pathlib.Path) -> None:
        """Write what the window shows as a PNG."""
        data = self._call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def pdf_bytes(self) -> int:
        """How large the page is when printed."""
        return len(base64.b64decode(self._call("Page.printToPDF", printBackground=True)["data"]))

    # --- the protocol ---------------------------------------------------------------------

    def _call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while True:
            answer = self._next()
            if answer.get("id") == message["id"]:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = self._read.read1()  # type: ignore[attr-defined]
            if not read:
                raise RuntimeError("Chromium has ended.")
            self._rest += read
        message, self._rest = self._rest.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(params["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
