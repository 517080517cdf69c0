"""What the tests of the commands share: data, converted weights, drawn shapes, a finished run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from detection.commands.convert import main as convert
from kscl.commands.make_shapes import main as make_shapes
from tests.helpers.data.sets import Thing, write_voc
from tests.helpers.detection_runs import start_train_net

READS = "reads.txt"  # one line per annotated set that the finished run has read


@pytest.fixture(scope="session")
def shop(tmp_path_factory) -> Path:
    """A folder with a small VOC set and converted random weights."""
    folder = tmp_path_factory.mktemp("shop")
    rng = np.random.default_rng(0)
    things: dict[str, list[Thing]] = {}
    for number in range(14):
        x, y = (int(value) for value in rng.integers(1, 40, 2))
        things[f"{number:03d}"] = [
            ("cat", (x, y, x + 30, y + 25), 0),
            ("dog", (x + 15, y + 10, x + 50, y + 50), 0),
        ]
    names = list(things)
    splits = {"train": names[:10], "test": names[10:], "val": names[10:12]}
    write_voc(folder / "voc", splits, things, size=(96, 100))
    for seed in (0, 1):
        words = ["random", "--arch", "resnet50", "--seed", str(seed)]
        words += ["--arch-kwargs", "{channels: [8, 16, 32, 64]}"]
        words += ["--protocol", "detection/shapes_tiny_c4.yaml"]
        assert convert([*words, "--output-dir", str(folder / f"weights{seed}")]) == 0
    return folder


@pytest.fixture(scope="session")
def drawn(tmp_path_factory) -> list[str]:
    """The words that name the drawn shapes as COCO files with masks, few and small."""
    root = tmp_path_factory.mktemp("shapes") / "set"
    sizes = ["--num-classes", "2", "--unlabeled", "1", "--train", "2", "--val", "2"]
    sizes += ["--detection-train", "8", "--detection-test", "3"]
    assert make_shapes(["--output-dir", str(root), *sizes]) == 0
    images = root / "VOCdevkit" / "VOC2007" / "JPEGImages"
    words = []
    for role, split in (("TRAIN", "trainval"), ("TEST", "test")):
        words += [f"DATASETS.{role}", f"('coco:{root}/coco/instances_{split}.json:{images}',)"]
    return words


def count_reads(file: Path) -> None:
    import kscl.data.annotated.voc

    read = kscl.data.annotated.voc.read_voc

    def counted(root, split, *words, **options):
        with file.open("a") as lines:
            lines.write(f"{split}\n")
        return read(root, split, *words, **options)

    kscl.data.annotated.voc.read_voc = counted


@pytest.fixture(scope="session")
def finished(shop, tmp_path_factory) -> Path:
    """A run to its end, undisturbed; nobody may change it."""
    output = tmp_path_factory.mktemp("finished") / "run"
    reads = output.parent / READS
    done = start_train_net(shop, output, before=count_reads, told=[reads]).wait()
    assert done.returncode == 0, done.stderr
    assert "(1 trial, voc07-11pt)" in done.stdout
    return output
