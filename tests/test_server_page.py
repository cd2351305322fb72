"""The chat page in a real browser: type, stream, stop, reload keeps the history, an error is shown, nothing foreign is loaded."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import bw24.server
from browser import PROGRAM, Browser
from serving import Server
from tiny_model import write_tiny

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium")
PAGE = Path(bw24.server.__file__).parent / "page"
REPLY = """Here is *some* **Markdown** with `code` and a [link](https://example.org/x):

```python
def f(x):
    return "<b>" + x
```

1. one
2. two

| a | b |
|---|---|
| 1 | <script>alert(1)</script> |

<img src=x onerror="window.hacked = 1">"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    one = Server(write_tiny(folder / "tiny.gguf", context=4096), log=folder / "log").wait()
    yield one
    assert one.stop() == 0


@pytest.fixture
def browser(tmp_path):
    one = Browser(tmp_path / "profile")
    yield one
    one.close()


def ask(browser: Browser, text: str) -> None:
    browser.run("document.getElementById('text').focus()")
    browser.type(text + "\n")


LAST = "[...document.querySelectorAll('.turn.assistant')].at(-1)"


def test_a_conversation(server, browser, tmp_path):
    browser.open(server.url + "/")
    browser.wait("document.getElementById('state').textContent === 'ready'")
    assert browser.run("document.getElementById('model').textContent") == "tiny.gguf"
    browser.click("#settings-button")
    browser.run("(() => { for (const [k, v] of [['max_tokens', 30], ['seed', 1]]) document.getElementById(k).value = v;"
                "document.getElementById('settings').dispatchEvent(new Event('change')); })()")
    browser.click("#settings-button")
    ask(browser, "Hello there")
    browser.wait(f"{LAST}?.querySelector('.notes')?.textContent.includes('tok/s')")
    first = browser.run(f"{LAST}.querySelector('.body').innerText")
    assert first and " tokens · " in browser.run(f"{LAST}.querySelector('.notes').textContent")
    assert browser.run("document.querySelector('.turn.user .body').textContent") == "Hello there"
    browser.call("Page.reload")
    browser.wait(f"{LAST}?.querySelector('.notes')")
    assert browser.run(f"{LAST}.querySelector('.body').innerText") == first and browser.run("document.getElementById('max_tokens').value") == "30"
    ask(browser, "And again")
    browser.wait("document.querySelectorAll('.turn.assistant .notes').length === 2")
    assert "cached" in browser.run(f"{LAST}.querySelector('.notes').textContent") and server.figure("bw24:prefix_cache_hits_total") > 0
    browser.click("#clear")
    assert browser.run("document.querySelectorAll('.turn').length") == 0
    assert not browser.problems, browser.problems


def test_stop_ends_the_reply_on_the_server_too(server, browser):
    browser.open(server.url + "/")
    browser.run("(() => { document.getElementById('max_tokens').value = 3900; })()")
    ask(browser, "A long one, please")
    browser.wait(f"{LAST}?.querySelector('.body').innerText.length > 5 || {LAST}?.querySelector('.notes')")
    assert browser.run("document.getElementById('send').textContent") in ("Stop", "Send")
    browser.click("#send")
    browser.wait(f"{LAST}.querySelector('.notes')")
    assert server.idle(5)["rows"] == 0 and browser.run("document.getElementById('send').textContent") == "Send"


def test_an_error_is_shown(server, browser):
    browser.open(server.url + "/")
    browser.run("(() => { document.getElementById('temperature').value = 9; })()")
    ask(browser, "Hi")
    assert "temperature: expected a number 0..2" in browser.wait("document.querySelector('.error')?.textContent")
    browser.run("(() => { document.getElementById('temperature').value = ''; document.getElementById('tools').value = '['; })()")
    ask(browser, "Hi")
    browser.wait("document.querySelectorAll('.error').length === 2")


class Scripted(BaseHTTPRequestHandler):
    """The page, and a reply with thinking, Markdown and a tool call."""

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", bw24.server.app.POLICY)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer("application/json", b'{"status": "ok", "model": "scripted"}')
        elif self.path in bw24.server.app.FILES:
            name, kind = bw24.server.app.FILES[self.path]
            self.answer(kind, (PAGE / name).read_bytes())
        else:
            self.answer("text/plain", b"")

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "Let me "}, {"reasoning_content": "think."}]
        deltas += [{"content": REPLY[i : i + 7]} for i in range(0, len(REPLY), 7)]
        call = {"index": 0, "id": "c", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Rome\"}"}}
        deltas += [{"tool_calls": [call]}]
        chunks = [{"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}],
                       "timings": {"predicted_per_second": 12.3, "prompt_ms": 5, "queue_ms": 0, "draft_n": 10, "draft_n_accepted": 7}})
        self.answer("text/event-stream", b"".join(b"data: " + json.dumps(c).encode() + b"\n\n" for c in chunks) + b"data: [DONE]\n\n")


def test_thinking_markdown_calls_and_figures(browser, tmp_path):
    import bw24.server.app  # noqa: F401

    http = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    http.asked = []
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        browser.open(f"http://127.0.0.1:{http.server_port}/")
        ask(browser, "Go")
        browser.wait(f"{LAST}?.querySelector('.notes')")
        assert browser.run(f"{LAST}.querySelector('details').open") is False
        assert browser.run(f"{LAST}.querySelector('details').textContent") == "ThoughtsLet me think."
        assert browser.run(f"{LAST}.querySelector('pre code').textContent") == 'def f(x):\n    return "<b>" + x'
        assert browser.run(f"[...{LAST}.querySelectorAll('li')].map(x => x.textContent).join()") == "one,two"
        assert browser.run(f"[...{LAST}.querySelectorAll('td')].map(x => x.textContent).join()") == "1,<script>alert(1)</script>"
        assert browser.run(f"{LAST}.querySelector('a').href") == "https://example.org/x"
        assert browser.run(f"{LAST}.querySelector('strong').textContent + {LAST}.querySelector('em').textContent") == "Markdownsome"
        assert browser.run(f"{LAST}.querySelectorAll('img, script').length") == 0 and browser.run("window.hacked") is None
        assert browser.run(f"{LAST}.querySelector('.call').textContent") == 'weather({"city": "Rome"})'
        figures = browser.run(f"{LAST}.querySelector('.notes').textContent")
        assert "12.3 tok/s" in figures and "70 % of drafts accepted" in figures
        browser.size(360, 640, dark=True)
        assert browser.run("document.documentElement.scrollWidth") <= 360
        assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(22, 22, 24)"
        browser.picture(tmp_path / "phone.png")
        ask(browser, "More")
        browser.wait("document.querySelectorAll('.turn.assistant .notes').length === 2")
        sent = http.asked[1]["messages"]
        assert [m["role"] for m in sent] == ["user", "assistant", "user"] and sent[1]["tool_calls"][0]["function"]["name"] == "weather"
        assert sent[1]["reasoning_content"] == "Let me think." and not browser.problems, browser.problems
    finally:
        http.shutdown()
