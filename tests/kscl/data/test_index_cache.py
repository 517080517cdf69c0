"""The index of images is cached, and made again where anything has changed."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from kscl.data import folder as image_files
from kscl.data.index_cache import cache_folder
from kscl.data.open import open_source
from kscl.data.tar import shards
from tests.kscl.data.test_open import contents, fill, long_ago, shard_members, write_tar

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def scans(monkeypatch):
    """How often a folder was walked or a shard looked through."""
    counted = []
    for module, name in ((image_files, "_walk_local"), (shards, "scan")):
        original = getattr(module, name)

        def count(path, original=original):
            counted.append(path)
            return original(path)

        monkeypatch.setattr(module, name, count)
    return counted


def test_a_second_start_takes_the_index_from_the_cache(tmp_path, scans, cache):
    fill(tmp_path, "a/1.jpg", "b/2.jpg")
    long_ago(tmp_path)
    first, second = (open_source(str(tmp_path)) for _ in range(2))
    assert len(scans) == 1
    assert contents(first) == contents(second)
    assert second.labels.classes == ["a", "b"]
    assert list(cache.rglob("*.npz"))


@pytest.mark.parametrize("change", ["added", "removed", "renamed", "new folder", "folder removed"])
def test_a_changed_folder_is_indexed_again(tmp_path, change, scans):
    fill(tmp_path, "a/1.jpg", "b/2.jpg")
    long_ago(tmp_path)
    before = len(open_source(str(tmp_path)))
    if change == "added":
        fill(tmp_path, "b/3.jpg")
    elif change == "removed":
        (tmp_path / "b/2.jpg").unlink()
    elif change == "renamed":
        (tmp_path / "b/2.jpg").rename(tmp_path / "b/0.jpg")
    elif change == "new folder":
        fill(tmp_path, "a/deep/4.jpg")
    else:
        (tmp_path / "b/2.jpg").unlink()
        (tmp_path / "b").rmdir()
    source = open_source(str(tmp_path))
    assert len(scans) == 2
    expected = {"added": 1, "new folder": 1, "renamed": 0}.get(change, -1)
    assert len(source) - before == expected
    assert all(os.path.exists(source.name(index)) for index in range(len(source)))


def test_an_index_made_in_the_moment_of_a_change_is_not_trusted(tmp_path, scans):
    fill(tmp_path, "1.jpg")
    stamp = os.stat(tmp_path).st_mtime_ns
    assert len(open_source(str(tmp_path))) == 1
    fill(tmp_path, "2.jpg")
    os.utime(tmp_path, ns=(stamp, stamp))  # as if the clock had not moved in between
    assert len(open_source(str(tmp_path))) == 2


def test_a_rewritten_shard_is_indexed_again(tmp_path, scans):
    write_tar(tmp_path / "s.tar", shard_members(0, 2))
    long_ago(tmp_path)
    for _ in range(2):
        assert len(open_source(str(tmp_path / "s.tar"))) == 2
    assert len(scans) == 1
    write_tar(tmp_path / "s.tar", shard_members(0, 5))
    assert len(open_source(str(tmp_path / "s.tar"))) == 5


def test_a_damaged_cache_is_made_anew(tmp_path, cache):
    fill(tmp_path, "1.jpg")
    long_ago(tmp_path)
    open_source(str(tmp_path))
    (file,) = cache.rglob("*.npz")
    for damage in (b"", b"junk", file.read_bytes()[:-100]):
        file.write_bytes(damage)
        assert len(open_source(str(tmp_path))) == 1


def test_a_cache_that_cannot_be_written_is_only_a_warning(tmp_path, caplog):
    fill(tmp_path, "set/1.jpg", "file")
    with caplog.at_level(logging.WARNING):
        assert len(open_source(str(tmp_path / "set"), cache_dir=str(tmp_path / "file"))) == 1
    assert "could not be cached" in caplog.text


def test_the_cache_folder_is_the_one_named_then_the_environments_then_the_users(monkeypatch):
    monkeypatch.setenv("KSCL_CACHE", "/from/environment")
    assert cache_folder("/named") == Path("/named")
    assert cache_folder() == Path("/from/environment")
    monkeypatch.delenv("KSCL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/kscl")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/kscl"
