"""The data fingerprint changes with the data and with nothing else."""

from __future__ import annotations

import logging
import os
import shutil

import pytest

from kscl.records import fingerprint as module
from kscl.records.fingerprint import SAMPLED_BYTES, SAMPLED_FILES, fingerprint


@pytest.fixture
def data(tmp_path):
    root = tmp_path / "data"
    for i in range(20):
        file = root / f"class{i % 2}" / f"{i}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes([i]) * (100 + i))
    return root


def test_a_copy_elsewhere_with_other_dates_has_the_same_fingerprint(data, tmp_path):
    copy = shutil.copytree(data, tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(copy / "class0" / "0.jpg", (0, 0))
    (copy / ".DS_Store").write_bytes(b"x")  # what file managers leave behind does not count
    assert fingerprint(copy) == fingerprint(data)
    assert fingerprint(data).files == 20
    assert fingerprint(data).bytes == sum(100 + i for i in range(20))


FILE = "class0/0.jpg"
CHANGES = {
    "rename": lambda data: (data / FILE).rename(data / "class0/zero.jpg"),
    "content": lambda data: (data / FILE).write_bytes(b"y" * (data / FILE).stat().st_size),
    "add": lambda data: (data / "new.jpg").write_bytes(b""),
    "remove": lambda data: (data / FILE).unlink(),
    "move": lambda data: (data / FILE).rename(data / "class1/0.jpg"),
}


@pytest.mark.parametrize("name", ["7.xml", "7.TXT", "all.json"])
def test_an_edit_of_an_annotation_shows_though_its_size_is_the_same(tmp_path, name):
    for i in range(2 * SAMPLED_FILES):  # so many that no sample has them all
        (tmp_path / f"{i}.xml").write_text("<xmin>10</xmin>")
    text = tmp_path / name
    text.write_text("<xmin>10</xmin>" * SAMPLED_BYTES)  # edited far from both ends
    before, alone = fingerprint(tmp_path), fingerprint(text)
    middle = text.stat().st_size // 2
    content = text.read_text()
    text.write_text(content[:middle] + content[middle:].replace("10", "11", 1))
    assert fingerprint(tmp_path).bytes == before.bytes
    assert fingerprint(tmp_path).hash != before.hash
    assert fingerprint(text).hash != alone.hash


def test_a_single_file_has_a_fingerprint_and_its_ends_count(tmp_path):
    file = tmp_path / "shard.tar"
    content = bytearray(4 * SAMPLED_BYTES)
    file.write_bytes(content)
    before = fingerprint(file).hash
    content[-1] = 1
    file.write_bytes(content)
    assert fingerprint(file).hash != before


def test_nothing_to_fingerprint_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=tmp_path.name):
        fingerprint(tmp_path)
    with pytest.raises(ValueError, match="nowhere"):
        fingerprint(tmp_path / "nowhere")


@pytest.fixture
def cached(data, tmp_path, monkeypatch):
    """A set that is large enough to be cached and looks settled; counts the walks."""
    monkeypatch.setattr(module, "CACHED_FROM", 20)
    monkeypatch.setenv("KSCL_CACHE", str(tmp_path / "cache"))
    settle(data)
    walks = []
    original = module.walk_files
    monkeypatch.setattr(
        module, "walk_files", lambda *given: walks.append(given) or original(*given)
    )
    return walks


def settle(data):
    for path in (data, *data.rglob("*")):
        os.utime(path, (1_000_000_000, 1_000_000_000))


def test_a_second_fingerprint_comes_from_the_cache(data, cached):
    assert fingerprint(data) == fingerprint(data)
    assert len(cached) == 1


@pytest.mark.parametrize("change", [*CHANGES, "size", "link"])
def test_any_change_makes_a_cached_fingerprint_anew(data, cached, change, tmp_path):
    before = fingerprint(data)
    if change == "size":
        (data / FILE).write_bytes(b"y")
        os.utime(data / FILE, (1_000_000_000, 1_000_000_000))  # the time alone would not tell
    elif change == "link":
        (tmp_path / "far.jpg").write_bytes(b"far")
        (data / "link.jpg").symlink_to(tmp_path / "far.jpg")
    else:
        CHANGES[change](data)
    assert fingerprint(data).hash != before.hash
    assert len(cached) == 2


def test_a_changed_target_of_a_link_makes_a_cached_fingerprint_anew(data, cached, tmp_path):
    (tmp_path / "far.jpg").write_bytes(b"far")
    (data / "link.jpg").symlink_to(tmp_path / "far.jpg")
    settle(data)
    before = fingerprint(data)
    (tmp_path / "far.jpg").write_bytes(b"other")
    assert fingerprint(data).hash != before.hash


def test_a_set_that_changed_a_moment_ago_is_not_trusted(data, cached):
    os.utime(data / "class0" / "0.jpg")
    fingerprint(data)
    fingerprint(data)
    assert len(cached) == 2


def test_of_a_larger_set_a_sample_of_the_files_is_checked(data, cached, monkeypatch):
    monkeypatch.setattr(module, "CHECKED_FILES", 5)
    before = fingerprint(data)
    for path in data.rglob("*.jpg"):  # as a conversion in place would change them
        path.write_bytes(b"new")
    assert fingerprint(data).hash != before.hash


def test_every_annotation_of_a_larger_set_is_checked(data, cached, monkeypatch):
    monkeypatch.setattr(module, "CHECKED_FILES", 5)
    for i in range(20):
        (data / f"{i}.xml").write_text("<xmin>10</xmin>")
    settle(data)
    before = fingerprint(data)
    for i in range(20):
        (data / f"{i}.xml").write_text("<xmin>11</xmin>")
        now = fingerprint(data)
        assert now.hash != before.hash
        before = now


def test_a_cache_that_cannot_be_written_or_read_costs_time_alone(data, cached, tmp_path, caplog):
    expected = fingerprint(data)
    (tmp_path / "file").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert fingerprint(data, str(tmp_path / "file")) == expected
    assert len(caplog.records) == 1
    (file,) = (tmp_path / "cache").rglob("*.npz")
    for damage in (b"", b"junk", file.read_bytes()[:-50]):
        file.write_bytes(damage)
        assert fingerprint(data) == expected


def test_the_fingerprints_of_recorded_runs_keep_their_values(data):
    assert fingerprint(data).hash == "e304f3b53a79e8d7"
