"""A headless Chromium over its debugging pipe: pages, scripts, typed text, pictures. Needs no driver package. Owns the browser's process."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

PROGRAM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


class Browser:
    """One page of one browser; its profile lives in `folder`."""

    def __init__(self, folder: Path, width: int = 1000, height: int = 800):
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        words = [PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
                 f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"]
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(["bash", "-c", shell, "bash", *words], pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = os.fdopen(ours_in, "rb", buffering=0), os.fdopen(ours_out, "wb", buffering=0)
        self._answers: dict[int, Any] = {}
        self._id, self._arrived = 0, threading.Condition()
        self.problems: list[str] = []  # exceptions and refused loads of the page
        threading.Thread(target=self._read, daemon=True).start()
        target = self.call("Target.createTarget", url="about:blank", session=None)["targetId"]
        self.session = None
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _read(self) -> None:
        held = b""
        while part := self._in.read(1 << 16):
            held += part
            while b"\0" in held:
                one, held = held.split(b"\0", 1)
                self._take(json.loads(one))

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(message["params"]["exceptionDetails"])[:500])
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.problems.append(message["params"]["entry"]["text"])
        if "id" in message:
            with self._arrived:
                self._answers[message["id"]] = message
                self._arrived.notify_all()

    def call(self, method: str, session: str | None = "page", **params: Any) -> dict[str, Any]:
        """A command of the debugging protocol, and its result."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if session and getattr(self, "session", None):
            message["sessionId"] = self.session
        self._out.write(json.dumps(message).encode() + b"\0")
        with self._arrived:
            assert self._arrived.wait_for(lambda: self._id in self._answers, 30), f"{method}: no answer"
            answer = self._answers.pop(self._id)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 15) -> Any:
        """Until the expression is true."""
        end = time.monotonic() + seconds
        plain = f"(() => {{ const v = ({script}); return v instanceof Node ? true : v; }})()"  # a node does not travel
        while not (value := self.run(plain)):
            assert time.monotonic() < end, f"{script} stayed {value!r}; page: {self.run('document.body.innerText')[:1000]}"
            time.sleep(0.03)
        return value

    def type(self, text: str) -> None:
        """Text into what has the focus; a line break is the Enter key."""
        self.call("Input.insertText", text=text.rstrip("\n"))
        if text.endswith("\n"):
            for kind, sent in (("keyDown", "\r"), ("keyUp", "")):
                self.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text=sent)

    def click(self, selector: str) -> None:
        rect = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        box = self.run(f"(() => {{ const r = {rect}; return [r.x + r.width / 2, r.y + r.height / 2]; }})()")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def size(self, width: int, height: int, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._out.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._in.close()
