"""A web server on this machine that fails in the ways of real ones, as often as it is told to."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

STALL_SECONDS = 3.0  # longer than the patience that a test sets


class BadServer(http.server.ThreadingHTTPServer):
    """Serves the files of a folder; the first answers to each path are the failures given."""

    def __init__(self, folder: Path, failures: Sequence[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.folder, self.failures = folder, list(failures)
        self.asked: Counter[str] = Counter()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(http.server.BaseHTTPRequestHandler):
    server: BadServer

    def do_GET(self) -> None:
        number = self.server.asked[self.path]
        self.server.asked[self.path] += 1
        failures = self.server.failures
        failure = failures[number] if number < len(failures) else ""
        file = self.server.folder / self.path.lstrip("/")
        if failure.isdecimal() or not file.is_file():
            self.send_error(int(failure or 404))
            return
        body = file.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # the other side has given up
            self.wfile.write(body[: len(body) // 2] if failure else body)
            self.wfile.flush()
            if failure == "stall":
                time.sleep(STALL_SECONDS)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serve(folder: Path, failures: Sequence[str] = ()) -> Iterator[BadServer]:
    """Serve a folder as long as a block lasts."""
    server = BadServer(folder, failures)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
