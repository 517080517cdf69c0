"""Public data sets: fetched from a real server, checked, merged; and looked at before a run."""

from __future__ import annotations

import functools
import hashlib
import http.server
import shutil
import tarfile
import threading
from pathlib import Path

import pytest

from detection.data.preflight import preflight
from kscl.commands.prepare_data import main
from kscl.datasets.public import Archive, check_imagenet, prepare_voc, voc_archives
from kscl.errors import KsclError
from tests.helpers.data.sets import write_voc

BOX = (1, 1, 20, 20)


def make_archive(folder: Path, year: str, split: str, ids: list[str], file: str) -> Archive:
    """A small archive built like the real ones, and what is known of it."""
    root = folder / "build" / split / "VOCdevkit" / year
    write_voc(root, {split: ids}, {i: [("cat", BOX, 0), ("dog", (5, 5, 30, 30), 0)] for i in ids})
    with tarfile.open(folder / file, "w") as tar:
        tar.add(root.parent, "VOCdevkit")
    md5 = hashlib.md5((folder / file).read_bytes()).hexdigest()
    return Archive(f"http://127.0.0.1:9/{file}", file, md5, year, split, len(ids))


@pytest.fixture
def server(tmp_path):
    """(address, archives): a real server on this machine."""
    folder = tmp_path / "server"
    archives = [
        make_archive(folder, "VOC2007", "trainval", ["000001", "000003"], "trainval.tar"),
        make_archive(folder, "VOC2007", "test", ["000002"], "test.tar"),
        make_archive(folder, "VOC2012", "trainval", ["2012_000001"], "trainval12.tar"),
    ]

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}", archives
        served.shutdown()


def test_archives_are_fetched_and_merged_into_detectron2_s_layout(server, tmp_path):
    mirror, archives = server
    root = tmp_path / "datasets"
    prepare_voc(root, root, archives, mirror)
    lists = root / "VOC2007" / "ImageSets" / "Main"
    assert {path.name for path in lists.iterdir()} == {"trainval.txt", "test.txt"}
    assert len(list((root / "VOC2007" / "JPEGImages").iterdir())) == 3
    assert not list(root.glob(".unpack*"))
    report = preflight([f"voc:{root}/VOC2007:trainval"], [f"voc:{root}/VOC2007:test"])
    assert report.class_names == ("cat", "dog")


def test_a_complete_set_needs_no_archive_and_no_network(server, tmp_path, capsys):
    mirror, archives = server
    root = tmp_path / "datasets"
    prepare_voc(root, tmp_path / "archives", archives, mirror)
    shutil.rmtree(tmp_path / "archives")
    prepare_voc(root, tmp_path / "archives", archives, "http://127.0.0.1:9")
    assert capsys.readouterr().out.count("already in") == 3


def test_archives_that_are_there_are_used_offline(server, tmp_path):
    _, archives = server
    prepare_voc(tmp_path / "datasets", tmp_path / "server", archives)
    assert (tmp_path / "datasets" / "VOC2012" / "ImageSets" / "Main" / "trainval.txt").is_file()


def test_a_damaged_archive_is_refused_and_nothing_is_unpacked(server, tmp_path):
    _, archives = server
    (tmp_path / "server" / "trainval.tar").write_bytes(b"half a file")
    with pytest.raises(KsclError, match="damaged"):
        prepare_voc(tmp_path / "datasets", tmp_path / "server", archives)
    assert not (tmp_path / "datasets").exists()


def test_no_network_names_the_file_and_where_to_put_it(server, tmp_path):
    _, archives = server
    with pytest.raises(KsclError, match=r"Fetch trainval\.tar some other way"):
        prepare_voc(tmp_path / "datasets", tmp_path / "none", archives)
    assert not list((tmp_path / "none").iterdir())


def test_a_download_with_another_hash_is_refused_and_not_kept(server, tmp_path):
    mirror, archives = server
    (tmp_path / "server" / "trainval.tar").write_bytes(b"an error page")
    with pytest.raises(KsclError, match=rf"{mirror}/trainval\.tar"):
        prepare_voc(tmp_path / "datasets", tmp_path / "none", archives, mirror)
    assert not list((tmp_path / "none").iterdir())


def test_an_archive_that_would_write_elsewhere_is_refused(tmp_path):
    archive = make_archive(tmp_path, "VOC2007", "test", ["1"], "test.tar")
    evil = tmp_path / "evil.tar"
    with tarfile.open(evil, "w") as tar:
        tar.add(tmp_path / "test.tar", "../../escaped")
    md5 = hashlib.md5(evil.read_bytes()).hexdigest()
    bad = Archive(archive.url, "evil.tar", md5, "VOC2007", "test", 1)
    with pytest.raises(KsclError, match="cannot be unpacked"):
        prepare_voc(tmp_path / "datasets", tmp_path, [bad])
    assert not (tmp_path.parent / "escaped").exists()


def test_the_known_archives_are_voc_2007_and_2012():
    assert [(each.file, each.split, each.count) for each in voc_archives()] == [
        ("VOCtrainval_06-Nov-2007.tar", "trainval", 5011),
        ("VOCtest_06-Nov-2007.tar", "test", 4952),
        ("VOCtrainval_11-May-2012.tar", "trainval", 11540),
    ]


def imagenet(root: Path, val: tuple[str, ...] = ("n01", "n02")) -> Path:
    for split, names in (("train", ("n01", "n02")), ("val", val)):
        for name in names:
            (root / split / name).mkdir(parents=True)
            (root / split / name / "a.JPEG").touch()
    return root


def test_imagenet_s_layout_is_recognized(tmp_path, capsys):
    assert "2 classes, 2 images in train and 2 images in val" in check_imagenet(
        imagenet(tmp_path), 2
    )
    assert main(["imagenet", "--root", str(tmp_path)]) == 2
    assert "2 class folders, not 1000" in capsys.readouterr().err


def test_all_that_is_wrong_with_imagenet_is_told_at_once(tmp_path):
    imagenet(tmp_path, ("n01", "n03"))
    (tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG").touch()
    (tmp_path / "train" / "n02" / "a.JPEG").unlink()
    with pytest.raises(KsclError) as error:
        check_imagenet(tmp_path, 2)
    for part in ("not in a folder of their class", "no image in n02", "differ in 2 classes"):
        assert part in str(error.value)
