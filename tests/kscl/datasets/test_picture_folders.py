"""CIFAR-10 and STL-10 as folders, from archives in torchvision's own layout."""

from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10, STL10

import kscl.datasets.public as sets
from kscl.commands.prepare_data import main
from kscl.config import shipped_configs
from kscl.errors import KsclError

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
    (lists / sets.SUBSET).parent.mkdir(parents=True)
    (lists / sets.SUBSET).write_text("# places\ntrain cat 0 2\ntrain dog 1\nval cat 1\nval dog 2\n")
    monkeypatch.setattr(sets, "shipped_configs", lambda: lists)
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
    assert "left as it is" in capsys.readouterr().out
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
    assert "1 images of cat, but the list wants index 2" in capsys.readouterr().err
    assert not (root / "cifar10_20k").exists()


def test_a_damaged_archive_without_a_network_is_an_error_that_leaves_nothing(cifar10, monkeypatch):
    (cifar10 / CIFAR10.base_folder / "data_batch_1").write_bytes(b"broken")
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")
    root = cifar10.parent / "data"
    with pytest.raises(KsclError, match=rf"CIFAR10 .*{cifar10}"):
        sets.prepare_cifar10(root, cifar10)
    assert not list(root.iterdir())


def test_unlabeled_pictures_of_stl10_lie_in_no_class(tmp_path, monkeypatch):
    labels = {"unlabeled": [-1, -1], "train": [0, 1], "test": [1]}

    class Small:
        classes = CLASSES

        def __init__(self, root, split, download):
            self.labels = labels[split]

        def __iter__(self):
            return ((Image.new("RGB", (4, 4)), label) for label in self.labels)

    monkeypatch.setattr(sets, "STL10", Small)
    folder = sets.prepare_stl10(tmp_path, tmp_path)
    assert sorted(pictures(folder)) == [
        *("test/dog/000000.png", "train/cat/000000.png", "train/dog/000001.png"),
        *("unlabeled/000000.png", "unlabeled/000001.png"),
    ]
    assert STL10.splits[2] == "unlabeled"  # torchvision's spelling, which we ask for


def test_the_shipped_list_has_two_thousand_pictures_of_each_class_and_no_overlap():
    path = shipped_configs() / sets.SUBSET
    subset = sets.read_subset(path)
    written = sum(len(line.split()) - 2 for line in path.open() if not line.startswith("#"))
    assert len(subset) == written == 20_000
    by_class = {}
    for (name, place), split in subset.items():
        assert 0 <= place < 5000
        by_class.setdefault((split, name), []).append(place)
    assert {len(places) for (split, _), places in by_class.items() if split == "train"} == {1800}
    assert {len(places) for (split, _), places in by_class.items() if split == "val"} == {200}
    assert len(by_class) == 20
