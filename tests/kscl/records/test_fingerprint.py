"""The data fingerprint changes with the data and with nothing else."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from kscl.records.fingerprint import SAMPLED_BYTES, fingerprint


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


@pytest.mark.parametrize("change", ["rename", "content", "add", "remove", "move"])
def test_any_change_of_a_small_set_shows(data, change):
    before = fingerprint(data).hash
    file = data / "class0" / "0.jpg"
    if change == "rename":
        file.rename(file.with_name("zero.jpg"))
    elif change == "content":
        file.write_bytes(b"y" * file.stat().st_size)
    elif change == "add":
        (data / "new.jpg").write_bytes(b"")
    elif change == "remove":
        file.unlink()
    else:
        file.rename(data / "class1" / "0.jpg")
    assert fingerprint(data).hash != before


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


def test_many_files_take_little_time(tmp_path):
    for folder in range(20):
        (tmp_path / str(folder)).mkdir()
        for i in range(1000):
            (tmp_path / str(folder) / f"{i}.jpg").touch()
    start = time.perf_counter()
    assert fingerprint(tmp_path).files == 20_000
    assert (
        time.perf_counter() - start < 5
    )  # a million then take minutes at worst, seconds as a rule
