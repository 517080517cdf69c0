"""Public data sets: fetched from a real server or archives, checked, laid out."""

from __future__ import annotations

import hashlib
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10, STL10

from detection.data.preflight import preflight
from kscl.commands.prepare_data import main
from kscl.config import shipped_configs
from kscl.datasets import public
from kscl.errors import KsclError
from tests.helpers.data.sets import write_voc
from tests.helpers.faults.bad_server import serve

BOX = (1, 1, 20, 20)


def make_archive(folder: Path, year: str, split: str, ids: list[str], file: str) -> public.Archive:
    """A small archive built like the real ones, and what is known of it."""
    root = folder / "build" / split / "VOCdevkit" / year
    write_voc(root, {split: ids}, {i: [("cat", BOX, 0), ("dog", (5, 5, 30, 30), 0)] for i in ids})
    with tarfile.open(folder / file, "w") as tar:
        tar.add(root.parent, "VOCdevkit")
    md5 = hashlib.md5((folder / file).read_bytes()).hexdigest()
    return public.Archive(f"http://127.0.0.1:9/{file}", file, md5, year, split, len(ids))


@pytest.fixture
def server(tmp_path):
    """(address, archives): a real server on this machine."""
    folder = tmp_path / "server"
    archives = [
        make_archive(folder, "VOC2007", "trainval", ["000001", "000003"], "trainval.tar"),
        make_archive(folder, "VOC2007", "test", ["000002"], "test.tar"),
        make_archive(folder, "VOC2012", "trainval", ["2012_000001"], "trainval12.tar"),
    ]
    with serve(folder) as served:
        yield served.address, archives


def test_archives_are_fetched_and_merged_into_detectron2_s_layout(server, tmp_path):
    mirror, archives = server
    root = tmp_path / "datasets"
    public.prepare_voc(root, root, archives, mirror)
    lists = root / "VOC2007" / "ImageSets" / "Main"
    assert {path.name for path in lists.iterdir()} == {"trainval.txt", "test.txt"}
    assert len(list((root / "VOC2007" / "JPEGImages").iterdir())) == 3
    assert not list(root.glob(".unpack*"))
    report = preflight([f"voc:{root}/VOC2007:trainval"], [f"voc:{root}/VOC2007:test"])
    assert report.class_names == ("cat", "dog")


def test_archives_are_used_offline_and_a_complete_set_needs_none(server, tmp_path, capsys):
    _, archives = server
    public.prepare_voc(tmp_path / "datasets", tmp_path / "server", archives)
    assert (tmp_path / "datasets" / "VOC2012" / "ImageSets" / "Main" / "trainval.txt").is_file()
    shutil.rmtree(tmp_path / "server")
    public.prepare_voc(tmp_path / "datasets", tmp_path / "server", archives)
    assert capsys.readouterr().out.count("already in") == 3


def test_a_damaged_archive_is_refused_and_nothing_is_unpacked(server, tmp_path):
    _, archives = server
    (tmp_path / "server" / "trainval.tar").write_bytes(b"half a file")
    with pytest.raises(KsclError, match="damaged"):
        public.prepare_voc(tmp_path / "datasets", tmp_path / "server", archives)
    assert not (tmp_path / "datasets").exists()


def test_no_network_names_the_file_and_where_to_put_it(server, tmp_path):
    _, archives = server
    with pytest.raises(KsclError, match=r"Put trainval\.tar into"):
        public.prepare_voc(tmp_path / "datasets", tmp_path / "none", archives)
    assert not list((tmp_path / "none").iterdir())


def test_a_download_with_another_hash_is_refused_and_not_kept(server, tmp_path):
    mirror, archives = server
    (tmp_path / "server" / "trainval.tar").write_bytes(b"an error page")
    with pytest.raises(KsclError, match=rf"{mirror}/trainval\.tar"):
        public.prepare_voc(tmp_path / "datasets", tmp_path / "none", archives, mirror)
    assert not list((tmp_path / "none").iterdir())


def test_an_archive_that_would_write_elsewhere_is_refused(tmp_path):
    archive = make_archive(tmp_path, "VOC2007", "test", ["1"], "test.tar")
    evil = tmp_path / "evil.tar"
    with tarfile.open(evil, "w") as tar:
        tar.add(tmp_path / "test.tar", "../../escaped")
    md5 = hashlib.md5(evil.read_bytes()).hexdigest()
    bad = public.Archive(archive.url, "evil.tar", md5, "VOC2007", "test", 1)
    with pytest.raises(KsclError, match="cannot be unpacked"):
        public.prepare_voc(tmp_path / "datasets", tmp_path, [bad])
    assert not (tmp_path.parent / "escaped").exists()


def test_the_known_archives_are_voc_2007_and_2012():
    assert [(each.file, each.split, each.count) for each in public.voc_archives()] == [
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
    assert "2 classes, 2 images in train and 2 images in val" in public.check_imagenet(
        imagenet(tmp_path), 2
    )
    assert main(["imagenet", "--root", str(tmp_path)]) == 2
    assert "2 class folders, not 1000" in capsys.readouterr().err


def test_all_that_is_wrong_with_imagenet_is_told_at_once(tmp_path):
    imagenet(tmp_path, ("n01", "n03"))
    (tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG").touch()
    (tmp_path / "train" / "n02" / "a.JPEG").unlink()
    with pytest.raises(KsclError) as error:
        public.check_imagenet(tmp_path, 2)
    for part in ("are not in class folders", "no image in n02", "differ in 2 classes"):
        assert part in str(error.value)


CLASSES = ["cat", "dog"]
LABELS = [0, 1, 1, 0, 0, 1]


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """Six pictures, each of one gray: its place in the archive."""
    folder = tmp_path / "archives" / CIFAR10.base_folder
    folder.mkdir(parents=True)
    gray = np.repeat(np.arange(6, dtype=np.uint8)[:, None] * 10, 3072, 1)
    contents = {
        "data_batch_1": {"data": gray, "labels": LABELS},
        "batches.meta": {"label_names": CLASSES},
    }
    md5 = {}
    for name, content in contents.items():
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        md5[name] = hashlib.md5(data).hexdigest()
    monkeypatch.setattr(CIFAR10, "train_list", [["data_batch_1", md5["data_batch_1"]]])
    monkeypatch.setattr(CIFAR10, "test_list", [])
    monkeypatch.setitem(CIFAR10.meta, "md5", md5["batches.meta"])
    lists = tmp_path / "configs"
    (lists / public.SUBSET).parent.mkdir(parents=True)
    (lists / public.SUBSET).write_text(
        "# places\ntrain cat 0 2\ntrain dog 1\nval cat 1\nval dog 2\n"
    )
    monkeypatch.setattr(public, "shipped_configs", lambda: lists)
    return tmp_path / "archives"


def pictures(folder):
    return {
        str(path.relative_to(folder)): np.asarray(Image.open(path))[0, 0, 0]
        for path in folder.rglob("*.png")
    }


def test_the_list_says_which_pictures_of_a_class_go_where(cifar10, tmp_path, capsys):
    command = ["cifar10", "--root", str(tmp_path / "data"), "--archives", str(cifar10)]
    assert main(command) == 0
    expected = {
        "train/cat/0000.png": 0,
        "train/cat/0002.png": 40,
        "train/dog/0001.png": 20,
        "val/cat/0001.png": 30,
        "val/dog/0002.png": 50,
    }
    folder = tmp_path / "data" / "cifar10_20k"
    assert pictures(folder) == expected
    assert main(command) == 0
    assert "already exists" in capsys.readouterr().out
    made = {path.name for path in folder.parent.iterdir()}
    assert made == {"cifar10_20k", "cifar10_small"}  # and nothing half made


@pytest.mark.parametrize("below", ["", "train"])
def test_a_copy_with_one_folder_a_class_will_do(cifar10, tmp_path, below):
    copy = tmp_path / "copy"
    for place, label in enumerate(LABELS):
        file = copy / below / CLASSES[label] / f"{place:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (place * 10,) * 3).save(file)
        (file.parent / ".DS_Store").touch()  # no picture, and sorted before them
    for root, source in (("one", cifar10), ("other", copy)):
        assert main(["cifar10", "--root", str(tmp_path / root), "--archives", str(source)]) == 0
    made = [pictures(tmp_path / root / "cifar10_20k") for root in ("one", "other")]
    assert made[0] == made[1]


def test_a_copy_that_lacks_pictures_is_refused(cifar10, tmp_path, capsys):
    for name in CLASSES:
        (tmp_path / "copy" / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "copy" / name / "0000.png")
    root = tmp_path / "data"
    assert main(["cifar10", "--root", str(root), "--archives", str(tmp_path / "copy")]) == 2
    assert "1 images of cat, but number 2 is needed" in capsys.readouterr().err
    assert not (root / "cifar10_20k").exists()


def test_a_damaged_archive_without_a_network_is_an_error_that_leaves_nothing(cifar10, monkeypatch):
    (cifar10 / CIFAR10.base_folder / "data_batch_1").write_bytes(b"broken")
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")
    root = cifar10.parent / "data"
    with pytest.raises(KsclError, match=rf"CIFAR10 .*{cifar10}"):
        public.prepare_cifar10(root, cifar10)
    assert not list(root.iterdir())


def test_unlabeled_pictures_of_stl10_lie_in_no_class(tmp_path, monkeypatch):
    labels = {"unlabeled": [-1, -1], "train": [0, 1], "test": [1]}

    class Small:
        classes = CLASSES

        def __init__(self, root, split, download):
            self.labels = labels[split]

        def __iter__(self):
            return ((Image.new("RGB", (4, 4)), label) for label in self.labels)

    monkeypatch.setattr(public, "STL10", Small)
    folder = public.prepare_stl10(tmp_path, tmp_path)
    assert sorted(pictures(folder)) == [
        *("test/dog/000000.png", "train/cat/000000.png", "train/dog/000001.png"),
        *("unlabeled/000000.png", "unlabeled/000001.png"),
    ]
    assert STL10.splits[2] == "unlabeled"  # torchvision's spelling, which we ask for


def test_the_shipped_list_has_two_thousand_pictures_of_each_class_and_no_overlap():
    path = shipped_configs() / public.SUBSET
    subset = public.read_subset(path)
    written = sum(len(line.split()) - 2 for line in path.open() if not line.startswith("#"))
    assert len(subset) == written == 20_000
    by_class = {}
    for (name, place), split in subset.items():
        assert 0 <= place < 5000
        by_class.setdefault((split, name), []).append(place)
    assert {len(places) for (split, _), places in by_class.items() if split == "train"} == {1800}
    assert {len(places) for (split, _), places in by_class.items() if split == "val"} == {200}
    assert len(by_class) == 20
