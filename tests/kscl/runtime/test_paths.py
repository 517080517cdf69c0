"""Paths and addresses: local ones as they are, others downloaded once and whole."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kscl.errors import KsclError
from kscl.runtime import paths
from kscl.runtime.paths import is_url, local_path


class Answers(http.server.BaseHTTPRequestHandler):
    """Serves its own port as text; /short breaks off, /empty has no byte."""

    def do_GET(self) -> None:
        body = str(self.server.server_address[1]).encode()
        if self.path == "/gone":
            self.send_error(410)
            return
        self.send_response(200)
        announced = {"/short": len(body) + 100, "/empty": 0}.get(self.path, len(body))
        self.send_header("Content-Length", str(announced))
        self.end_headers()
        self.wfile.write(b"" if self.path == "/empty" else body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(paths, "BACKOFF_SECONDS", 0.0)


@pytest.fixture
def servers() -> Iterator[list[str]]:
    """Two web servers on this machine."""
    running = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) for _ in range(2)]
    for server in running:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [f"http://127.0.0.1:{server.server_address[1]}" for server in running]
    for server in running:
        server.shutdown()
        server.server_close()


def test_a_local_path_stays_as_it_is(tmp_path: Path) -> None:
    assert local_path("some/file.pth", tmp_path) == Path("some/file.pth")
    assert not is_url("httpd/file.pth")
    assert not list(tmp_path.iterdir())


def test_two_hosts_with_the_same_path_have_two_files(servers: list[str], tmp_path: Path) -> None:
    paths = [local_path(f"{server}/weights/b.pth", tmp_path) for server in servers]
    assert [path.read_text() for path in paths] == [server.split(":")[2] for server in servers]
    assert all(path.suffix == ".pth" for path in paths)


def test_a_query_does_not_hide_the_ending(servers: list[str], tmp_path: Path) -> None:
    path = local_path(f"{servers[0]}/b.safetensors?download=true", tmp_path)
    assert path.suffix == ".safetensors"


@pytest.mark.parametrize("page", ["short", "empty", "gone"])
def test_what_is_not_whole_is_an_error_and_never_cached(
    servers: list[str], tmp_path: Path, page: str
) -> None:
    for _ in range(2):
        with pytest.raises(KsclError, match=f"{servers[0]}/{page}"):
            local_path(f"{servers[0]}/{page}", tmp_path)
    assert not [path for path in tmp_path.rglob(f"*{page}*") if path.suffix != ".lock"]


def test_a_cache_that_cannot_be_written_is_named(servers: list[str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(KsclError, match="cache"):
        local_path(f"{servers[0]}/b.pth", tmp_path / "cache")
