"""Checkpoints on disk: whole or not there, known when damaged, and never run as code."""

from __future__ import annotations

import hashlib
import pickle
import shutil

import pytest
import torch

from kscl.errors import KsclError
from kscl.run.checkpoint import (
    CheckpointError,
    bytes_of,
    find_checkpoints,
    load_newest,
    remove_unfinished,
    save_checkpoint,
    step_of,
)
from tests.helpers.faults.full_disk import small_files
from tests.helpers.runs import same_bits


def content(step: int, numbers: int = 1000) -> dict:
    generator = torch.Generator().manual_seed(step)
    optimizer = {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
    return {
        "learner": {"weight": torch.randn(numbers, generator=generator)},
        "optimizer": optimizer,
        "config": {"SOLVER": {"EPOCHS": 3, "NAMES": ["a", "b"]}},
        "step": step,
    }


def save_steps(folder, *steps, keep=9):
    return [save_checkpoint(folder, step, content(step), keep) for step in steps]


def test_what_is_saved_comes_back_to_the_bit_under_a_name_of_step_and_checksum(tmp_path):
    assert load_newest(tmp_path / "none") is None
    (path,) = save_steps(tmp_path, 41)
    found = load_newest(tmp_path)
    assert found is not None
    assert found[0] == path
    assert same_bits(found[1], content(41))
    assert step_of(path) == 41
    assert hashlib.sha256(path.read_bytes()).hexdigest()[:16] in path.name


def test_only_the_newest_are_kept(tmp_path):
    save_steps(tmp_path, 1, 2, 9, 10, keep=2)
    assert [step_of(path) for path in find_checkpoints(tmp_path)] == [10, 9]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_later_checkpoint_does_not_push_out_what_was_just_written(tmp_path, keep):
    damaged = save_steps(tmp_path, 4, 8, 12)[2]
    cut(damaged)
    (path,) = save_steps(tmp_path, 10, keep=keep)
    found = load_newest(tmp_path)
    assert found is not None
    assert found[0] == path
    assert len(find_checkpoints(tmp_path)) == keep + 1
    save_steps(tmp_path, 14, 16, keep=keep)
    assert damaged not in find_checkpoints(tmp_path)
    assert len(find_checkpoints(tmp_path)) == keep


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, flip_a_bit, empty])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(tmp_path, damage):
    first, second = save_steps(tmp_path, 1, 2)
    damage(second)
    found = load_newest(tmp_path)
    assert found is not None
    assert found[0] == first
    damage(first)
    with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
        load_newest(tmp_path)


class RunsCode:
    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path('it-ran').touch()",)


def test_a_pickle_with_code_in_it_is_refused_and_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for write in (torch.save, lambda x, path: path.write_bytes(pickle.dumps(x, 2))):
        file = tmp_path / "unnamed"
        write({"learner": RunsCode()}, file)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        file.rename(tmp_path / f"checkpoint-000000009-{digest}.pt")
        with pytest.raises(KsclError, match="can run code"):
            load_newest(tmp_path)
        (tmp_path / f"checkpoint-000000009-{digest}.pt").unlink()
    assert not (tmp_path / "it-ran").exists()


def test_a_disk_with_too_little_room_is_reported_before_writing(tmp_path, monkeypatch):
    (first,) = save_steps(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)._replace(free=12_345)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError) as error:
        save_steps(tmp_path, 2)
    needed = bytes_of(content(2)) + 2**20
    assert f"{needed:,} bytes" in str(error.value)
    assert str(first) in str(error.value)
    assert list(tmp_path.iterdir()) == [first]


def test_a_disk_that_fills_up_while_writing_leaves_the_earlier_checkpoint(tmp_path):
    (first,) = save_steps(tmp_path, 1)
    with small_files(100_000), pytest.raises(CheckpointError) as error:
        save_checkpoint(tmp_path, 2, content(2, numbers=1_000_000), 1)
    assert "too full for a checkpoint of 4.8" in str(error.value)
    assert f"the one before it is intact: {first}" in str(error.value)
    assert list(tmp_path.iterdir()) == [first]
    assert load_newest(tmp_path) is not None


def test_an_error_while_saving_leaves_nothing_behind(tmp_path):
    save_steps(tmp_path, 1)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save_checkpoint(tmp_path, 2, {"learner": lambda: None}, 1)
    assert [step_of(path) for path in tmp_path.iterdir()] == [1]


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    (first,) = save_steps(tmp_path, 1)
    (tmp_path / ".checkpoint-000000002.unfinished").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    remove_unfinished(tmp_path)
    assert sorted(tmp_path.iterdir()) == [first, tmp_path / "notes.txt"]


def test_a_folder_that_cannot_be_written_to_is_an_error_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        save_checkpoint(tmp_path / "file" / "checkpoints", 1, content(1), 1)
