"""Paths and addresses: local ones as they are, others downloaded once and whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from kscl.errors import KsclError
from kscl.runtime import paths
from kscl.runtime.paths import cached_file, cached_path, is_url
from tests.helpers.faults.bad_server import serve


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(paths, "BACKOFF_SECONDS", 0.0)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "served").mkdir()
    return tmp_path / "served"


def test_a_path_that_begins_like_an_address_is_none() -> None:
    assert not is_url("httpd/file.pth")


def test_two_hosts_with_the_same_path_have_two_files(folder: Path, tmp_path: Path) -> None:
    kept = []
    for content in ("one", "other"):
        (folder / "b.pth").write_text(content)
        with serve(folder) as server:
            kept.append(cached_file(f"{server.address}/b.pth", tmp_path / "cache"))
    assert [path.read_text() for path in kept] == ["one", "other"]
    assert all(path.suffix == ".pth" for path in kept)
    assert cached_path("http://x/b.pth?download=true", tmp_path).suffix == ".pth"


@pytest.mark.parametrize("failure", ["truncate", "410", ""])
def test_what_is_not_whole_is_an_error_and_never_cached(
    folder: Path, tmp_path: Path, failure: str
) -> None:
    (folder / "page").write_text("whole" if failure else "")
    with serve(folder, [failure] * 99) as server:
        for _ in range(2):
            with pytest.raises(KsclError, match=f"{server.address}/page"):
                cached_file(f"{server.address}/page", tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").rglob("*page*") if p.suffix != ".lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(KsclError, match="cache"):
        cached_file("http://127.0.0.1:1/b.pth", tmp_path / "cache")
