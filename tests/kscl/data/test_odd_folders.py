"""What lies in real data folders: links in circles, pipes, closed files. Nothing hangs or crashes.

Every oddity is either skipped by name, and counted, or a clear error.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import signal
import tarfile
import tempfile
from pathlib import Path

import pytest
from PIL import Image

from kscl.config.defaults import pretrain_defaults
from kscl.data.bad_images import BadImages
from kscl.data.decode import read_picture
from kscl.data.formats import UnreadableImage
from kscl.data.loader import build_train_loader
from kscl.data.open import open_source
from kscl.errors import KsclError
from kscl.records.fingerprint import fingerprint
from linear_eval.data.images import open_data
from linear_eval.errors import LinearEvalError
from tests.helpers.digits import config as probe_config
from tests.helpers.digits import write_digits
from tests.helpers.photos import jpeg, photo

GOOD = 12
NOBODY = 65534


@pytest.fixture(autouse=True)
def no_test_hangs():
    def hang(*_):
        raise AssertionError("it waits for ever")

    signal.signal(signal.SIGALRM, hang)
    signal.alarm(120)
    yield
    signal.alarm(0)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("KSCL_CACHE", str(folder))
    return folder


@pytest.fixture
def folder():
    """Twelve good images, in a place that any user may enter."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    whole = photo(0)
    for number in range(GOOD):
        piece = whole[8 * number : 8 * number + 40, 10 * number : 10 * number + 50]
        (root / f"{number:02d}.jpg").write_bytes(jpeg(piece))
    yield root
    shutil.rmtree(root)


@pytest.fixture
def config(folder):
    cfg = pretrain_defaults()
    cfg.DATA.TRAIN = str(folder)
    cfg.DATA.NUM_WORKERS = 0
    cfg.DATA.MAX_BAD_FRACTION = 0.5
    cfg.INPUT.SIZE = 32
    cfg.METHOD.NUM_SHOTS = 1
    cfg.SOLVER.BATCH_SIZE = 4
    return cfg


def link_to_itself(path):
    path.symlink_to(path.name)


def links_in_a_circle(path):
    path.symlink_to("other")
    (path.parent / "other").symlink_to(path.name)


def dead_link(path):
    path.symlink_to("/nowhere/at all.jpg")


ODD = {
    "link to itself": link_to_itself,
    "links in a circle": links_in_a_circle,
    "dead link": dead_link,
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_not_a_file_is_skipped_by_name_and_counted(folder, config, kind, caplog):
    ODD[kind](folder / "odd.jpg")
    with caplog.at_level(logging.WARNING):
        source = open_source(str(folder))
    assert len(source) == GOOD
    assert str(folder / "odd.jpg") in caplog.text
    loader = build_train_loader(config, source, last_step=6)
    assert len(list(loader)) == 6
    assert loader.bad_images.count == len(source.lost) >= 1


@pytest.mark.parametrize("kind", ODD)
def test_a_fingerprint_neither_waits_nor_ends_in_a_traceback(folder, kind):
    before = fingerprint(folder)
    ODD[kind](folder / "odd.jpg")
    assert fingerprint(folder) == before


@pytest.mark.parametrize("kind", ODD)
def test_a_list_may_name_anything(folder, config, kind):
    ODD[kind](folder / "odd.jpg")
    names = [f"{number:02d}.jpg" for number in range(GOOD)]
    odd = ["odd.jpg", "n" * 300 + ".jpg", "d/" * 3000 + "x.jpg", "a\0b.jpg", ".", "gone.jpg"]
    (folder / "list.txt").write_text("\n".join([*names, *odd]))
    config.DATA.TRAIN = str(folder / "list.txt")
    source = open_source(config.DATA.TRAIN)
    for index in range(GOOD, len(source)):
        with pytest.raises(UnreadableImage, match=r"\w"):
            read_picture(source, index)
    loader = build_train_loader(config, open_source(config.DATA.TRAIN), last_step=12)
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


def test_a_tree_full_of_links_to_its_own_top_is_walked_once(folder):
    before = fingerprint(folder).hash, len(open_source(str(folder)))
    for number in range(20):
        (folder / f"loop{number}").symlink_to(folder)
    assert (fingerprint(folder).hash, len(open_source(str(folder)))) == before


def test_a_folder_and_a_link_to_it_give_its_images_by_their_own_names(folder):
    (folder / "z").mkdir()
    (folder / "00.jpg").rename(folder / "z/00.jpg")
    (folder / "a").symlink_to(folder / "z")
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
    dead_link(folder / "odd.jpg")
    config.DATA.MAX_BAD_FRACTION = 0.05
    with pytest.raises(KsclError, match=r"1 of the 13 images.*MAX_BAD_FRACTION.*odd\.jpg"):
        build_train_loader(config, open_source(config.DATA.TRAIN), last_step=1)
    config.DATA.MAX_BAD_FRACTION = 0.5
    config.DATA.BAD_IMAGES = "error"
    with pytest.raises(KsclError, match=r"odd\.jpg"):
        build_train_loader(config, open_source(config.DATA.TRAIN), last_step=1)


def test_an_image_of_too_many_pixels_is_a_bad_image(folder, config):
    (folder / "large.jpg").write_bytes(jpeg(photo(1, 100, 100)))
    config.DATA.MAX_PIXELS = 9999
    loader = build_train_loader(config, open_source(config.DATA.TRAIN), last_step=9)
    list(loader)
    assert loader.bad_images.names() == [str(folder / "large.jpg")]


def damaged_shards(folder, damaged_header):
    """Two shards of ten images; one header in the middle of the first is overwritten."""
    images = sorted(folder.glob("*.jpg"))
    for shard in range(2):
        with tarfile.open(folder / f"s{shard}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(10):
                info = tarfile.TarInfo(f"{shard}{number:03d}.jpg")
                content = images[number].read_bytes()
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    with tarfile.open(folder / "s0.tar") as tar:
        offset = tar.getmembers()[5].offset
    with open(folder / "s0.tar", "r+b") as file:
        file.seek(offset)
        file.write(damaged_header)
    os.utime(folder / "s0.tar", (1e9, 1e9))
    os.utime(folder / "s1.tar", (1e9, 1e9))
    return str(folder / "s{0..1}.tar")


@pytest.mark.parametrize("damage", [b"\0" * 512, b"junk" * 128], ids=["zeros", "junk"])
def test_a_damaged_shard_loses_one_image_which_is_named_every_time(folder, config, damage, caplog):
    config.DATA.TRAIN = damaged_shards(folder, damage)
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            source = open_source(config.DATA.TRAIN)
        assert len(source) == 19
        assert "s0.tar at byte" in caplog.text
        assert "0004.jpg" in caplog.text
    loader = build_train_loader(config, open_source(config.DATA.TRAIN), last_step=1)
    list(loader)
    assert loader.bad_images.count == 1
    config.DATA.MAX_BAD_FRACTION = 0.01
    with pytest.raises(KsclError, match=r"1 of the 20 images.*s0\.tar"):
        build_train_loader(config, open_source(config.DATA.TRAIN), last_step=1)


def test_a_shard_that_ends_in_junk_counts_the_images_that_it_must_have_held(folder):
    where = damaged_shards(folder, b"")
    length = (folder / "s0.tar").stat().st_size
    with open(folder / "s0.tar", "r+b") as file:
        file.seek(length // 2 // 512 * 512)
        file.write(b"\xa5" * (length - file.tell()))
    source = open_source(where)
    bad = BadImages(source, "skip", 1.0)
    assert 2 <= bad.count <= 8


def test_a_probe_scores_no_set_with_a_lost_image(tmp_path):
    root = write_digits(tmp_path / "digits", train=2, val=1)
    dead_link(root / "val/digit_3/odd.png")
    with pytest.raises(LinearEvalError, match=r"odd\.png"):
        open_data(probe_config(root, tmp_path))


def test_a_user_without_a_home_has_no_cache_and_no_traceback(folder, monkeypatch, caplog):
    monkeypatch.delenv("KSCL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with caplog.at_level(logging.WARNING):
        assert len(open_source(str(folder))) == GOOD
    assert len(caplog.records) == 1
    assert "DATA.CACHE_DIR" in caplog.text


def test_a_cache_that_nobody_may_write_is_one_line(folder, caplog):
    with caplog.at_level(logging.WARNING):
        assert len(open_source(str(folder), cache_dir="/proc/none")) == GOOD
    assert len(caplog.records) == 1
