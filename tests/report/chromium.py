"""A real browser for tests, driven over two pipes with nothing but the standard library: open a page, touch it, look at it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
PATIENCE_SECONDS = 60


class Chromium:
    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        read, child_write = os.pipe()
        child_read, write = os.pipe()

        def wire() -> None:  # in the child: commands come in on 3, answers go out on 4
            os.dup2(os.dup2(child_read, 20), 3)
            os.dup2(os.dup2(child_write, 21), 4)

        flags = ("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")
        self.process = subprocess.Popen(
            [CHROMIUM, *flags, "--disable-dev-shm-usage", f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=wire, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(child_read)
        os.close(child_write)
        self._read, self._write = read, write
        self._buffer = b""
        self._count = 0
        self.errors: list[str] = []  # what the page threw or logged as an error
        self.requests: list[str] = []  # every address it asked for
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self("enable", domain=domain)

    def __call__(self, method: str, domain: str = "Page", **parameters: Any) -> Any:
        return self._send(f"{domain}.{method}", parameters, self._session)

    def _send(self, method: str, parameters: dict[str, Any], session: str | None = None) -> Any:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._hear(answer)

    def _hear(self, event: dict[str, Any]) -> None:
        about = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event.get("method") == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(about["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE_SECONDS
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("chromium does not answer")
            found = os.read(self._read, 1 << 20)
            if not found:
                raise EOFError("chromium has ended")
            self._buffer += found
        message, self._buffer = self._buffer.split(b"\0", 1)
        loaded: dict[str, Any] = json.loads(message)
        return loaded

    # -- what a person does ---------------------------------------------------------------------------------------------------------

    def open(self, path: Path, *, width: int = 1200, height: int = 900, scale: float = 1, dark: bool = False) -> None:
        self("setDeviceMetricsOverride", domain="Emulation", width=width, height=height, deviceScaleFactor=scale, mobile=width < 500)
        self("setEmulatedMedia", domain="Emulation", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self("navigate", url=path.resolve().as_uri())
        until = time.monotonic() + PATIENCE_SECONDS
        while self.js("document.readyState === 'complete' && document.documentElement.dataset.ready") != "yes":
            if time.monotonic() > until:
                raise TimeoutError(f"the page is not ready: {self.errors}")
            time.sleep(0.02)
        self.settle()

    def js(self, expression: str) -> Any:
        found = self("evaluate", domain="Runtime", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", found))
        return found["result"].get("value")

    def settle(self) -> None:
        """Until what was asked for is drawn."""
        self.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def box(self, selector: str) -> tuple[float, float, float, float]:
        self.js(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        self.settle()
        shape = self.js(
            f"(({{left, top, width, height}}) => [left, top, width, height])(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        return tuple(shape)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self("dispatchMouseEvent", domain="Input", type=kind, x=x, y=y, **more)
        self.settle()

    def click(self, selector: str) -> None:
        left, top, width, height = self.box(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, left + width / 2, top + height / 2, button="left", clickCount=1)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("mousePressed", *start, button="left", buttons=1, clickCount=1)
        for part in (0.25, 0.5, 0.75, 1.0):
            self.mouse("mouseMoved", start[0] + (end[0] - start[0]) * part, start[1] + (end[1] - start[1]) * part, button="left", buttons=1)
        self.mouse("mouseReleased", *end, button="left", clickCount=1)

    def key(self, name: str) -> None:
        text = {"text": name} if len(name) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self("dispatchKeyEvent", domain="Input", type=kind, key=name, **(text if kind == "keyDown" else {}))
        self.settle()

    def picture(self, path: Path, *, whole: bool = False) -> None:
        clip = {}
        if whole:
            height, width = self.js("[document.documentElement.scrollHeight, innerWidth]")
            clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}, "captureBeyondViewport": True}
        path.write_bytes(base64.b64decode(self("captureScreenshot", format="png", **clip)["data"]))

    def close(self) -> None:
        try:
            self._send("Browser.close", {})
        except (EOFError, OSError, TimeoutError):
            self.process.kill()
        self.process.wait(timeout=PATIENCE_SECONDS)
        os.close(self._read)
        os.close(self._write)
