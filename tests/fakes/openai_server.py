"""A small HTTP server with OpenAI's API on a real socket, which streams scripted answers, one chunk per token."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Script:
    """How the server answers, and what it has received."""

    pause: float = 0.0
    """Seconds before each chunk."""
    turns: threading.Semaphore | None = None
    """If set, the server acquires it once before each chunk, and then pauses."""
    status: int = 200
    fail_from: int = 1
    """Number of the first generation, counted from 1, that is answered with `status`."""
    usage: bool = True
    """Whether usage is sent to clients that request it."""
    says_done: bool = True
    """Whether the stream ends with [DONE] after its finish_reason."""
    ends_early: bool = False
    """The stream ends without a finish_reason."""
    error_after: int | None = None
    """Number of chunks before an error event ends the stream."""
    bodies: list[dict] = field(default_factory=list)
    """The requests."""
    tokens: list[str | None] = field(default_factory=list)
    """The requests' Authorization headers."""
    in_flight: int = 0
    max_in_flight: int = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Without this, the kernel would join chunks.
    disable_nagle_algorithm = True
    script: Script
    lock = threading.Lock()

    def do_GET(self) -> None:
        self._answer(200, {"object": "list", "data": [{"id": "small", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        script = self.script
        with self.lock:
            script.bodies.append(body)
            script.tokens.append(self.headers["Authorization"])
            fails = script.status != 200 and len(script.bodies) >= script.fail_from
        if fails:
            self._answer(script.status, {"error": {"message": "no room"}})
        else:
            self._stream(body)

    def log_message(self, *_: object) -> None:
        pass

    def _stream(self, body: dict) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with self._counted():
            self._chunks(body)
        if not self.script.ends_early:
            self._end(body)
        self._write(b"")

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Not to include the stream's last event: once it was sent, the client may start its next request."""
        with self.lock:
            self.script.in_flight += 1
            self.script.max_in_flight = max(self.script.max_in_flight, self.script.in_flight)
        try:
            yield
        finally:
            with self.lock:
                self.script.in_flight -= 1

    def _chunks(self, body: dict) -> None:
        if "messages" in body:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for i in range(body["max_tokens"]):
            if self.script.turns is not None:
                self.script.turns.acquire()
            time.sleep(self.script.pause)
            if i == self.script.error_after:
                self._event({"error": {"message": "engine died"}})
                break
            part = {"delta": {"content": f"w{i} "}} if "messages" in body else {"text": f"w{i} "}
            self._event({"choices": [{"index": 0, **part}]})

    def _end(self, body: dict) -> None:
        self._event({"choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": "length"}]})
        if self.script.usage and body.get("stream_options", {}).get("include_usage"):
            prompt = body.get("prompt") or body["messages"][0]["content"]
            tokens = 2 * len(prompt.split())
            self._event({"choices": [], "usage": {"prompt_tokens": tokens, "completion_tokens": body["max_tokens"]}})
        if self.script.says_done:
            self._write(b"data: [DONE]\n\n")

    def _event(self, message: dict) -> None:
        self._write(f": a comment\n\ndata: {json.dumps(message)}\n\n".encode())

    def _write(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _answer(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serve(script: Script, port: int = 0) -> Iterator[str]:
    """Yields the server's address."""
    handler = type("Handler", (_Handler,), {"script": script})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
