"""A folder is seen whole or not at all."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from kscl.errors import KsclError
from kscl.runtime import files
from kscl.runtime.files import whole_folder, write_atomically


def test_a_folder_gets_its_name_when_it_is_complete(tmp_path):
    with whole_folder(tmp_path / "new" / "set") as place:
        (place / "file").write_text("whole")
        assert not (tmp_path / "new" / "set").exists()
    assert (tmp_path / "new" / "set" / "file").read_text() == "whole"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["set"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_is_written_where_folders_cannot_be_synced(tmp_path, monkeypatch, number):
    sync = os.fsync

    def refuse_folders(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        sync(handle)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    write_atomically(tmp_path / "file", b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole"


@pytest.mark.parametrize("replace", [True, False])
def test_a_failure_leaves_what_was_there(tmp_path, replace):
    def fail(place):
        (place / "file").write_text("half")
        raise ZeroDivisionError

    (tmp_path / "set").mkdir()
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "set", replace=replace) as place:
        fail(place)
    assert [path.name for path in tmp_path.rglob("*")] == ["set"]


def test_a_folder_with_something_in_it_is_replaced_only_on_request(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine").write_text("")
    with pytest.raises(KsclError, match="set cannot be written"), whole_folder(tmp_path / "set"):
        pass
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["mine"]
    with whole_folder(tmp_path / "set", replace=True) as place:
        (place / "file").write_text("")
    assert [path.name for path in tmp_path.rglob("*")] == ["set", "file"]


def test_a_place_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    message = "file/set cannot be written"
    with pytest.raises(KsclError, match=message), whole_folder(tmp_path / "file" / "set"):
        raise AssertionError


def test_an_interruption_right_after_the_renaming_is_not_hidden_by_another_error(
    tmp_path, monkeypatch
):
    def rename_and_stop(name, path):
        os.rename(name, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", rename_and_stop)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
