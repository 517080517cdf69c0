"""What lies in real data folders: links in circles, pipes, closed files. Nothing hangs or crashes.

Every oddity is either skipped by name, and counted, or a clear error.
"""

from __future__ import annotations

import logging
import os
import shutil

import pytest
from PIL import Image

from kscl.data.formats import UnreadableImage
from kscl.data.loader import build_train_loader
from kscl.data.open import open_source
from kscl.data.source import read_picture
from kscl.errors import KsclError
from kscl.records.fingerprint import fingerprint
from linear_eval.images import open_data
from tests.helpers.data.digits import config as probe_config
from tests.helpers.data.digits import write_digits
from tests.kscl.data.conftest import GOOD, ODD_FILES

pytestmark = pytest.mark.usefixtures("cache", "no_test_hangs")

NOBODY = 65534


def links_in_a_circle(path):
    path.symlink_to("other")
    (path.parent / "other").symlink_to(path.name)


ODD = ODD_FILES | {"links in a circle": links_in_a_circle}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_not_a_file_is_skipped_by_name_and_counted(folder, config, kind, caplog):
    before = fingerprint(folder)
    ODD[kind](folder / "odd.jpg")
    assert fingerprint(folder) == before
    with caplog.at_level(logging.WARNING):
        source = open_source(str(folder))
    assert len(source) == GOOD
    assert str(folder / "odd.jpg") in caplog.text
    loader = build_train_loader(config, source, last_step=6)
    assert len(list(loader)) == 6
    assert loader.bad_images.count == len(source.lost) >= 1


def test_a_list_may_name_anything(folder, config):
    os.mkfifo(folder / "odd.jpg")
    names = [f"{number:02d}.jpg" for number in range(GOOD)]
    odd = ["odd.jpg", "n" * 300 + ".jpg", "d/" * 3000 + "x.jpg", "a\0b.jpg", ".", "gone.jpg"]
    (folder / "list.txt").write_text("\n".join([*names, *odd]))
    config.DATA.TRAIN = str(folder / "list.txt")
    source = open_source(config.DATA.TRAIN)
    for index in range(GOOD, len(source)):
        with pytest.raises(UnreadableImage, match=r"\w"):
            read_picture(source, index)
    loader = build_train_loader(config, source, last_step=12)
    list(loader)
    assert loader.bad_images.count == len(odd)


@pytest.mark.parametrize("kind", ODD)
def test_data_that_is_no_folder_at_all_is_a_clear_error(folder, kind):
    for name in ("odd", "odd.txt", "odd.tar"):
        ODD[kind](folder / name)
        with pytest.raises(KsclError, match="odd"):
            open_source(str(folder / name))
        with pytest.raises(KsclError, match="odd"):
            fingerprint(folder / name)
        (folder / "other").unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["n" * 300, "d/" * 3000, "a\0b", "~nobody knows/x"])
def test_names_that_cannot_be_are_clear_errors(name):
    for where in (name, f"{name}.txt", f"{name}.tar", f"voc:{name}:train"):
        with pytest.raises(KsclError):
            open_source(where)


def test_a_folder_and_a_link_to_it_give_its_images_by_their_own_names(folder):
    (folder / "z").mkdir()
    (folder / "00.jpg").rename(folder / "z/00.jpg")
    (folder / "a").symlink_to(folder / "z")
    (folder / "loop").symlink_to(folder)
    source = open_source(str(folder))
    assert [source.name(i) for i in range(len(source))][-1] == str(folder / "z/00.jpg")
    assert len(source) == GOOD


def test_a_link_that_comes_back_to_life_is_noticed(folder, tmp_path):
    (folder / "class").symlink_to(tmp_path / "later")
    for path in (folder, *folder.iterdir()):
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    assert len(open_source(str(folder))) == GOOD
    (tmp_path / "later").mkdir()
    shutil.copy(folder / "00.jpg", tmp_path / "later/new.jpg")
    assert len(open_source(str(folder))) == GOOD + 1


@pytest.fixture
def without_privileges():
    """Root may read everything; nobody may not."""
    Image.init()
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)


def test_a_closed_file_is_a_bad_image_and_known_to_the_fingerprint(
    folder, config, without_privileges, monkeypatch
):
    monkeypatch.setenv("KSCL_CACHE", "/dev/null/none")
    before = fingerprint(folder)
    owner, us = os.stat(folder).st_uid, os.geteuid()
    os.seteuid(owner)
    (folder / "03.jpg").chmod(0)
    os.seteuid(us)
    loader = build_train_loader(config, open_source(config.DATA.TRAIN), last_step=12)
    list(loader)
    assert loader.bad_images.names() == [str(folder / "03.jpg")]
    assert "denied" in loader.bad_images.reasons[3]
    assert fingerprint(folder).files == GOOD
    assert fingerprint(folder).hash != before.hash


def test_a_closed_folder_is_a_clear_error(folder, without_privileges):
    owner, us = os.stat(folder).st_uid, os.geteuid()
    os.seteuid(owner)
    (folder / "closed").mkdir(mode=0)
    os.seteuid(us)
    for look in (open_source, fingerprint):
        with pytest.raises(KsclError, match="closed"):
            look(str(folder))


def test_too_many_lost_images_or_the_policy_error_stop_the_run(folder, config):
    ODD["dead link"](folder / "odd.jpg")
    config.DATA.MAX_BAD_FRACTION = 0.05
    with pytest.raises(KsclError, match=r"1 of the 13 images.*MAX_BAD_FRACTION.*odd\.jpg"):
        build_train_loader(config, open_source(config.DATA.TRAIN), last_step=1)
    config.DATA.MAX_BAD_FRACTION = 0.5
    config.DATA.BAD_IMAGES = "error"
    with pytest.raises(KsclError, match=r"odd\.jpg"):
        build_train_loader(config, open_source(config.DATA.TRAIN), last_step=1)


def test_without_a_cache_or_a_home_there_is_one_line_and_no_traceback(folder, monkeypatch, caplog):
    monkeypatch.delenv("KSCL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    for cache_dir in ("", "/proc/none"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert len(open_source(str(folder), cache_dir)) == GOOD
        assert len(caplog.records) == 1
        assert "DATA.CACHE_DIR" in caplog.text


def test_a_probe_scores_no_set_with_a_lost_image(tmp_path):
    root = write_digits(tmp_path / "digits", train=2, val=1)
    ODD["dead link"](root / "val/digit_3/odd.png")
    with pytest.raises(KsclError, match=r"odd\.png"):
        open_data(probe_config(root, tmp_path))
