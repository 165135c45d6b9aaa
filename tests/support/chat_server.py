"""A chat endpoint on this machine, as many are there in the world: it answers, stumbles, or says nonsense."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["chat_server", "completion"]

Reply = tuple[int, dict[str, str], bytes]


def completion(text: str) -> Reply:
    """Returns a whole answer."""
    content = {"choices": [{"message": {"content": text}}], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
    return 200, {}, json.dumps(content).encode()


@contextmanager
def chat_server(reply: Callable[[dict[str, Any]], Reply]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the address up to ``/v1``, and the requests so far: their content, with ``path`` and ``key``.

    Args:
        reply: Status, headers and body for a request.
    """
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({**content, "path": self.path, "key": self.headers.get("Authorization")})
            status, headers, body = reply(content)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # whoever asked did not wait for the answer

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
