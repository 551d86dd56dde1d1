"""A headless Chromium, driven over two pipes by the DevTools protocol; no driver and no library is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

CHROMIUM: Final = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)
LIMIT_S: Final = 60.0


class Browser:
    """One page.

    Args:
        width, height: of the window, in pixels.
        is_dark: whether the reader prefers a dark page.
    """

    def __init__(self, width: int = 1300, height: int = 1000, is_dark: bool = False) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()

        def at_3_and_4() -> None:  # where Chromium looks for them; the numbers of ours may be the same
            low, high = os.dup(to_read), os.dup(to_write)
            os.dup2(low, 3)
            os.dup2(high, 4)

        self._process = subprocess.Popen(
            [
                CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--remote-debugging-pipe", "--hide-scrollbars", "--no-first-run", f"--window-size={width},{height}",
                f"--user-data-dir={self._profile.name}", "about:blank",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(3, 4, to_read, to_write),
            preexec_fn=at_3_and_4, start_new_session=True,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._left = b""
        self._last = 0
        self._session: str | None = None
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(LIMIT_S)
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript on the page."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_until(self, expression: str, limit_s: float = LIMIT_S) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + limit_s
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"{expression} is not true after {limit_s} s"
            time.sleep(0.1)  # the page has no event for this

    def save_picture(self, path: Path) -> None:
        data = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + LIMIT_S
        while True:
            while b"\0" not in self._left:
                ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
                more = os.read(self._from, 1 << 20) if ready else b""
                assert more, f"Chromium has not answered {method} within {LIMIT_S} s, or has ended"
                self._left += more
            text, _, self._left = self._left.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self._last:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
